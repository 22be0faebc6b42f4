"""The parts of a backward pass give the gradients of the whole, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftcli.models.kernels.backward_parts import PARTS, boundaries_of, parts_of
from ftcli.tiny_models import build_tiny

from ....support.small_classifiers import CLASSIFIERS, TEXT, reads_texts, small_classifier


def forward(model: nn.Module, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    inputs: dict[str, Tensor] = {"pixel_values": torch.randn(3, 3, 32, 32)}
    if reads_texts(kind):
        inputs = {"input_ids": torch.randint(2, 32, (3, 9)), "attention_mask": torch.ones(3, 9, dtype=torch.int64)}
    with boundaries_of(model) as boundaries:
        logits = model(**inputs).logits
    return [logits], boundaries


def gradients_by_part(model: nn.Module, outputs: list[Tensor], boundaries: list[Tensor]) -> tuple[int, dict[int, Any]]:
    leaves, gradients, found = list(model.parameters()), [torch.ones_like(outputs[0])], {}
    parts = parts_of(outputs, boundaries, leaves)
    for part in parts:
        gradients, own = part.gradients(leaves, gradients)
        found |= dict(zip(part.weights, own, strict=True))
    return len(parts), found


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_parts_of_every_architecture_give_the_gradients_of_the_whole(kind: str) -> None:
    model = small_classifier(kind)
    outputs, _ = forward(model, kind)
    expected = torch.autograd.grad(outputs, list(model.parameters()), [torch.ones_like(outputs[0])], allow_unused=True)
    outputs, boundaries = forward(model, kind)
    count, found = gradients_by_part(model, outputs, boundaries)
    assert sorted(found) == list(range(len(expected))) and 1 <= count <= PARTS
    for number, gradient in enumerate(expected):
        assert (found[number] is None) == (gradient is None)
        assert gradient is None or found[number].equal(gradient)


def deep_bert(**config: Any) -> nn.Module:
    model: nn.Module = build_tiny("BertForSequenceClassification", **TEXT | {"num_hidden_layers": 8}, **config)
    return model.train()


def test_a_chain_of_layers_has_parts_with_about_as_many_weights() -> None:
    model = deep_bert()
    outputs, boundaries = forward(model, "bert")
    parts = parts_of(outputs, boundaries, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    layers = [{int(names[n].split(".")[3]) for n in part.weights if ".layer." in names[n]} for part in parts]
    assert layers == [{6, 7}, {4, 5}, {2, 3}, {0, 1}]
    assert any("classifier" in names[n] for n in parts[0].weights)
    assert any("embeddings" in names[n] for n in parts[-1].weights)


def test_a_weight_that_two_parts_share_makes_them_one() -> None:
    model: Any = deep_bert()
    model.bert.encoder.layer[7].output.dense.weight = model.bert.encoder.layer[0].output.dense.weight
    outputs, boundaries = forward(model, "bert")
    assert len(boundaries) == PARTS - 1
    count, found = gradients_by_part(model, outputs, boundaries)
    expected = torch.autograd.grad(
        forward(model, "bert")[0], list(model.parameters()), [torch.ones_like(outputs[0])], allow_unused=True
    )
    assert count == 1 and all(
        found[number] is None or found[number].equal(gradient) for number, gradient in enumerate(expected)
    )


def test_a_connection_around_a_boundary_makes_one_part() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    middle = first(torch.randn(2, 4))
    leaves = [*first.parameters(), *second.parameters()]
    assert len(parts_of([second(middle)], [middle], leaves)) == 2
    middle = first(torch.randn(2, 4))
    around = middle.tanh()  # computed before the boundary
    boundary = middle * 2
    assert len(parts_of([second(boundary) + around], [boundary], leaves)) == 1
    assert len(parts_of([second(torch.randn(2, 4))], [boundary], leaves)) == 1  # the outputs do not depend on it


def test_another_output_of_the_operation_at_a_boundary_makes_one_part() -> None:
    first, second = nn.Linear(4, 8), nn.Linear(4, 4)
    leaves = [*first.parameters(), *second.parameters()]
    for around in (False, True):
        for number in (0, 1):
            outputs = first(torch.randn(2, 4)).chunk(2, -1)
            result = second(outputs[number]) + (outputs[1 - number] if around else 0)
            assert len(parts_of([result], [outputs[number]], leaves)) == (1 if around else 2)


def test_weights_without_a_gradient_belong_to_the_last_part() -> None:
    first, second, unused = (nn.Linear(4, 4) for _ in range(3))
    middle = first(torch.randn(2, 4))
    leaves = [*first.parameters(), *second.parameters(), *unused.parameters()]
    parts = parts_of([second(middle)], [middle], leaves)
    assert [sorted(part.weights) for part in parts] == [[2, 3], [0, 1, 4, 5]]
    gradients, own = parts[0].gradients(leaves, [torch.ones(2, 4)])
    assert parts[1].gradients(leaves, gradients)[1][-2:] == [None, None]
    assert len(own) == 2

"""The architecture table: rows, defaults, and the settings that other modules derive from it."""

from __future__ import annotations

from ftcli.models.architectures import (
    ARCHITECTURES,
    HEAD_SETTINGS,
    LINEAR,
    Architecture,
    architecture_of,
    model_types_with,
)


def test_architecture_of_an_unknown_type_is_the_row_of_defaults() -> None:
    assert architecture_of("bloom") == architecture_of(None) == architecture_of(["llama"]) == Architecture()
    assert not any(vars(Architecture()).values()), "a default must mean that nothing is replaced"


def test_model_types_with_gives_the_order_of_the_table() -> None:
    assert model_types_with("has_experts") == ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"]
    assert model_types_with("has_attention_sinks") == ["gpt_oss"]


def test_architectures_with_packed_attention_have_a_known_head() -> None:
    assert set(model_types_with("packed_attention")) <= set(model_types_with("head"))


def test_head_settings_are_those_of_the_table() -> None:
    assert {row.head for row in ARCHITECTURES.values()} == {None, LINEAR, *HEAD_SETTINGS}


def test_layers_with_experts_are_not_compiled_by_default() -> None:
    assert not set(model_types_with("has_experts")) & set(model_types_with("compiles_layers"))

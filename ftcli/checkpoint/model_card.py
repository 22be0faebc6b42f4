"""The model card of trained weights, of an adapter with code that loads it, and of a merged adapter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.answer_ends import BASE_LACKS_IT, describe_answer_ends
from ftcli.config.recipe_model import NO_MODEL
from ftcli.data.revisions import is_on_hub
from ftcli.models.adapter_folder import BASE_CONFIG, has_label_names
from ftcli.runtime.redaction import redact

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe

HOW_TO_LOAD = "## How to load"
RESIZE_BASE = "If the base has fewer rows, first `base.resize_token_embeddings(len(tokenizer))`."


def model_card(
    recipe: Recipe,
    metrics: dict[str, float],
    model: Any = None,
    auto_class: str = "",
    pipeline_tag: str | None = None,
    *,
    task: Any = None,
) -> str:
    """Return the model card of the trained weights, without secrets.

    Args:
        recipe: Recipe of the run.
        metrics: Metrics of the last evaluation.
        model: The model, for the names of its labels.
        auto_class: Name of transformers' class that loads the model.
        pipeline_tag: Name of the task on the hub; None leaves it out.
        task: The task of the run, for the tokens that end an answer.
    """
    from huggingface_hub import ModelCardData

    named = [(recipe.model.name, recipe.model.revision)]
    named += [(source.path, source.revision) for source in recipe.data.train_sources]
    commits = [f"{name} {revision}" for name, revision in named if revision and is_on_hub(name)]
    measured = [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
    table = ["| metric | value |", "|---|---|", *measured] if measured else ["Not evaluated."]
    kind = "LoRA adapter for" if recipe.adapter.type == "lora" else "Fine-tuned from"
    base = recipe.model.name
    if base == NO_MODEL:
        kind, base = "A model that its task builds", ""
    trained_on = ", ".join(source.path for source in recipe.data.train_sources)
    tokens = ", ".join(f"`{token}`" for token in recipe.model.new_tokens)
    resized = f"New tokens: {tokens}. " if tokens else ""
    if tokens and recipe.adapter.type != "none":
        resized += RESIZE_BASE
    variables = json.dumps(recipe.data.chat_template_kwargs, ensure_ascii=False)
    rendered = f"Its chat template was given `{variables}`: give `apply_chat_template` the same." * (variables != "{}")
    ends = describe_answer_ends(task, is_adapter=recipe.adapter.type != "none")
    has_code = bool(getattr(getattr(model, "config", None), "auto_map", None))
    how_to_load = loading_instructions(
        auto_class, label_names(model), pipeline_tag, has_code=has_code, has_new_tokens=bool(tokens)
    )
    library = "peft" if recipe.adapter.type == "lora" else "transformers" if auto_class else None
    header = ModelCardData(library_name=library, tags=["ftcli"], pipeline_tag=pipeline_tag)
    card = "\n".join(
        [
            "---",
            header.to_yaml(),
            "---",
            f"# {kind} {base}".rstrip(),
            "",
            f"Task {recipe.task} on {trained_on}, {recipe.batch.global_size} rows a step, "
            f"learning rate {recipe.optimizer.learning_rate:g}, precision {recipe.precision}, seed {recipe.seed}.",
            *(["", f"Commits: {', '.join(commits)}."] if commits else []),
            *(["", resized] if resized else []),
            *(["", rendered] if rendered else []),
            *(["", ends] if ends else []),
            "",
            *table,
            "",
            *(how_to_load if recipe.adapter.type != "none" else []),
        ]
    )
    return redact(card)


def label_names(model: Any) -> list[str]:
    """Return the label names of a classifier, in the order of its logits; empty for another model."""
    config: Any = getattr(model, "config", None)
    return list(config.id2label.values()) if has_label_names(config) else []


def loading_instructions(
    auto_class: str,
    labels: Sequence[str],
    pipeline_tag: str | None,
    *,
    has_code: bool = False,
    has_new_tokens: bool = False,
) -> list[str]:
    """Return the last section of a model card: code that loads a classifier's adapter with its label names.

    peft loads the adapter, because transformers leaves out the magnitudes of DoRA, and cannot resize a base.

    Args:
        auto_class: transformers' class that loads the base model.
        labels: Names of the classes.
        pipeline_tag: The task's name on the hub; None if it has none.
        has_code: Whether the base model has Python code of its own. transformers does not look for it in a subfolder.
        has_new_tokens: Whether the adapter has rows of tokens for which the base may have none.

    Returns:
        Lines of Markdown; empty without labels or tag.
    """
    if pipeline_tag is None or not labels:
        return []
    processor = "image_processor" if pipeline_tag.startswith("image-") else "tokenizer"
    classes = [auto_class, "pipeline"]
    if has_code:
        names = ", ".join(f"{index}: {json.dumps(name, ensure_ascii=False)}" for index, name in enumerate(labels))
        given, prepared = "them as `id2label`. Its Python code is run", [f"names = {{{names}}}"]
        options = "id2label=names, ignore_mismatched_sizes=True, trust_remote_code=True"
    else:
        given = "the configuration that has them"
        prepared = [f'config = AutoConfig.from_pretrained(folder, subfolder="{BASE_CONFIG}")']
        classes.append("AutoConfig")
        options = "config=config, ignore_mismatched_sizes=True"
    resized = []
    if has_new_tokens:
        classes.append("AutoTokenizer")
        resized = [
            "tokens = len(AutoTokenizer.from_pretrained(folder))",
            "if tokens > base.get_input_embeddings().num_embeddings:",
            "    base.resize_token_embeddings(tokens)",
        ]
    return [
        HOW_TO_LOAD,
        "",
        f"The base model has no label names, so give it {given}. `folder` is this folder.",
        "",
        "```python",
        "from peft import PeftConfig, PeftModel",
        f"from transformers import {', '.join(sorted(classes))}",
        "",
        "adapter = PeftConfig.from_pretrained(folder)",
        *prepared,
        f"base = {auto_class}.from_pretrained(",
        f"    adapter.base_model_name_or_path, revision=adapter.revision, {options}",
        ")",
        *resized,
        "model = PeftModel.from_pretrained(base, folder).get_base_model()  # the base, with the adapter in its layers",
        f'classify = pipeline("{pipeline_tag}", model=model, {processor}=folder)',
        "```",
        "",
    ]


def merged_card(text: str) -> str:
    """Return the model card of an adapter as that of a merged model."""
    text = text.partition(HOW_TO_LOAD)[0].replace("library_name: peft", "library_name: transformers")
    text = text.replace(BASE_LACKS_IT, "").replace(RESIZE_BASE, "")
    return text.replace("# LoRA adapter for", "# Fine-tuned (LoRA, merged) from")

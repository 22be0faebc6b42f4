"""The properties of a task: its own class attributes, else defaults that fit tasks of earlier versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ftcli.config.task_registry import find_task, task_class, tasks_where
from ftcli.tasks.protocol import TaskProperties, properties_of


class Bare:
    """A task of an earlier version, with none of the newer attributes."""

    auto_class = "AutoModelForSequenceClassification"


class Named(Bare):
    """A task that declares two of them."""

    pipeline_tag = "text-ranking"
    default_truncation = "drop"


def test_properties_of_a_task_without_any_are_the_defaults_of_its_model_class() -> None:
    properties = properties_of(Bare)
    assert properties == TaskProperties(pipeline_tag="text-classification", adapter_task_type="SEQ_CLS")
    assert properties_of(Bare()) == properties
    assert properties_of(None) == TaskProperties()


def test_properties_of_a_task_that_declares_some_are_its_own() -> None:
    properties = properties_of(Named)
    assert (properties.pipeline_tag, properties.default_truncation) == ("text-ranking", "drop")
    assert properties.adapter_task_type == "SEQ_CLS"


LANGUAGE_MODELS = ["preference", "pretrain", "sft", "unpaired_preference"]


def test_tasks_where_names_the_shipped_tasks_with_a_property() -> None:
    assert tasks_where(lambda task: task.uses_vocabulary_logits) == LANGUAGE_MODELS
    assert tasks_where(lambda task: task.default_truncation == "split") == ["pretrain"]
    assert tasks_where(lambda task: not task.reads_text) == ["face_swap", "image_classification"]
    assert tasks_where(lambda task: task.needs_tokenizer) == sorted([*LANGUAGE_MODELS, "reward", "text_classification"])


def test_task_class_does_not_import_the_task_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unimported.py").write_text(
        "from ftcli.tasks import sft\nfrom ftcli.tasks.sft import Options\nclass Task(sft.Task): ...\n"
    )
    assert task_class("./unimported.py") is None
    assert task_class("some_package.unimported") is None
    assert "ftcli_user_task_unimported" not in sys.modules
    module = find_task("./unimported.py")
    assert task_class("./unimported.py") is module.Task
    assert properties_of(module.Task).uses_vocabulary_logits, "a derived task has the properties of its base"


def test_task_class_of_an_unknown_name_is_none() -> None:
    assert task_class("no_such_task") is None

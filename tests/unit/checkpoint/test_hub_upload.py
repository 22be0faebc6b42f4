"""Uploads with the real client to a hub on this machine; one process without torch, because the client reads its
settings when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.recipe import Hub
from ftcli.runtime.errors import InputError

from ...support.model_hub import READ_ONLY_TOKEN, TOKEN

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, os, pathlib, sys
from tests.support.model_hub import READ_ONLY_TOKEN, receiving
with receiving() as hub:
    os.environ.update(hub.environment("home"))
    from huggingface_hub import constants
    from ftcli.checkpoint.hub_upload import create_repository, upload
    from ftcli.runtime.errors import InputError
    responses = {}
    def refused(case, call, *arguments, **options):
        try:
            responses[case] = call(*arguments, **options)
        except InputError as error:
            responses[case] = str(error)
    folder = pathlib.Path("export")
    refused("owner", create_repository, "nobody/model", private=False)
    os.environ["HF_TOKEN"] = READ_ONLY_TOKEN
    refused("read only", create_repository, "model", private=False)
    os.environ["HF_TOKEN"] = "hf_unknownToken12345678"
    refused("unknown", create_repository, "model", private=False)
    del os.environ["HF_TOKEN"]
    refused("no token", create_repository, "model", private=False)
    os.environ.update(hub.environment("home"))
    constants.HF_HUB_OFFLINE = True
    refused("offline", create_repository, "model", private=False)
    constants.HF_HUB_OFFLINE = False
    refused("name", create_repository, "a//b", private=False)
    responses["nothing"] = [request for request in hub.requests if "create" not in request and "GET" not in request]
    refused("created", create_repository, "open", private=False)
    refused("public", create_repository, "open", private=True)
    refused("private", create_repository, "model", private=True)
    refused("commit", upload, folder, "somebody/model", "First")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    refused("again", upload, folder, "somebody/model", "Second")
    hub.refused = "/commit/"
    (folder / "README.md").write_text("changed")
    refused("broken", upload, folder, "somebody/model", "Third")
    repository = hub.repositories["somebody/model"]
    responses["files"] = {name: content.decode() for name, content in repository.files.items()}
    responses["state"] = [repository.private, repository.commits]
from huggingface_hub import close_session
close_session()  # its connection to the server is still open
refused("network", create_repository, "model", private=False)
print(json.dumps(responses))
"""


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("upload")
    (folder / "export").mkdir()
    (folder / "export" / "README.md").write_text("a card")
    (folder / "export" / "model.safetensors").write_text("weights")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert TOKEN not in done.stdout + done.stderr and READ_ONLY_TOKEN not in done.stdout + done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("owner", "nobody/model was not uploaded: the token may not write to this repository"),
        ("read only", "the token may not write to this repository\n    use a token with write access"),
        ("unknown", "the hub does not accept the token"),
        ("no token", "--push: there is no token for http://127.0.0.1"),
        ("offline", "HF_HUB_OFFLINE is set, so nothing can be uploaded"),
        ("name", "'a//b' is not the name of a repository"),
        ("public", "somebody/open exists and is public, but a private one is requested"),
        ("broken", "somebody/model was not uploaded: the hub answered 500"),
        ("network", "cannot be reached"),
    ],
)
def test_upload_with_wrong_input_names_what_where_and_the_remedy(
    case: str, text: str, responses: dict[str, Any]
) -> None:
    response = responses[case]
    assert text in response and response.startswith("--push: ") and "\n    " in response or case == "name"
    assert responses["nothing"] == []  # no request of a refused upload sends a file


def test_upload_sends_all_files_and_replaces_the_weights_of_an_earlier_upload(responses: dict[str, Any]) -> None:
    assert responses["private"] == "somebody/model" and "/somebody/model/commit/" in responses["commit"]
    assert responses["files"] == {"README.md": "a card", "model-00001-of-00001.safetensors": "weights"}
    assert responses["state"] == [True, ["First", "Second"]]
    assert responses["stderr"] == ""  # no progress bars, because it is not a terminal


@pytest.mark.parametrize("name", ["model", "some-body/my_model.v2", "a/b"])
def test_hub_section_accepts_names_that_the_client_accepts(name: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(name)
    assert Hub(push=name).push == name


@pytest.mark.parametrize("name", ["", "a/b/c", "a//b", "-a", "a.", "a--b", "a..b", "x" * 97, "a.git", "a b", "ä"])
def test_hub_section_refuses_names_that_the_client_refuses(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with pytest.raises(HFValidationError):
        validate_repo_id(name)
    with pytest.raises(ValueError, match="is not the name of a repository"):
        Hub(push=name)


def test_push_of_a_missing_run_is_refused_before_a_request(tmp_path: Path) -> None:
    from ftcli.reports.push import push

    with pytest.raises(InputError, match="there is no folder"):
        push(tmp_path / "none", "somebody/model")

"""Credentials leave no trace in what ftcli writes and logs: in texts, run folders, exports, and on the command line."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ftcli.__main__ import main
from ftcli.checkpoint.folder import read_state
from ftcli.config.load import dump_recipe, load_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.trust import stored_form
from ftcli.data.paths import labels_of
from ftcli.data.streaming.remote_files import file_system
from ftcli.launch import worker_recipe
from ftcli.launch.machines import ONE_MACHINE
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.failures import record_failure
from ftcli.runtime.redaction import is_redacted, redact, redact_address, redact_error
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import save_tiny_causal
from ftcli.training.resume import recipe_changes

from ...support.recipes import minimal_values

# (text, what is left of it)
TEXTS = [
    ("https://user:pa%40ss@host:8080/a.jsonl?x=1", "https://REDACTED@host:8080/a.jsonl?x=1"),
    ("https://token123@host/", "https://REDACTED@host/"),
    ("https://user:pa/ss@host/x", "https://REDACTED@host/x"),
    ("s3://KEY:SECRET@bucket/x", "s3://REDACTED@bucket/x"),
    ("simplecache::https://u:p@h/a", "simplecache::https://REDACTED@h/a"),
    ("https://h/x?token=short&page=2", "https://h/x?token=REDACTED&page=2"),
    (
        "https://h/x?X-Amz-Date=1&X-Amz-Signature=abc&y=2",
        "https://h/x?X-Amz-Date=REDACTED&X-Amz-Signature=REDACTED&y=REDACTED",
    ),
    ("https://h/x?se=2024&sig=Zm9v%3D&sp=r", "https://h/x?se=REDACTED&sig=REDACTED&sp=REDACTED"),
    ("https://h/x?abcdefghij1234567890zz", "https://h/x?REDACTED"),
    ("https://h/x#access_token=abc", "https://h/x#access_token=REDACTED"),
    ("cannot open 'https://u:p@h/x?sig=1&z=2'.", "cannot open 'https://REDACTED@h/x?sig=REDACTED&z=REDACTED'."),
    ('{"url": "https://h/?sig=a\\"b"}', '{"url": "https://h/?sig=REDACTED\\"b"}'),
    ("Authorization: Bearer abcdefghijkl", "Authorization: Bearer REDACTED"),
    ("{'Authorization': 'Basic dXNlcjpwYXNz'}", "{'Authorization': 'Basic REDACTED'}"),
    ("{'authorization': 'tok_9'}", "{'authorization': 'REDACTED'}"),
    ("sent Bearer abcDEF123_x", "sent Bearer REDACTED"),
    ("sent Basic dXNlcjpwYXNz", "sent Basic REDACTED"),
    ("key sk-" + "proj-a1B2c3D4e5F6g7H8_x-y", "key REDACTED"),
    ("key sk-" + "aB-cD_" * 12, "key REDACTED"),
    ("Set-Cookie: session=abc; path=/", "Set-Cookie: REDACTED"),
    ("api_key=abc, next", "api_key=REDACTED, next"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=REDACTED"),
    ("password: hunter2", "password: REDACTED"),
    ("password=letmein, db_password: letmein", "password=REDACTED, db_password: REDACTED"),
    ("{'password': 'letmein'}; password:letmein", "{'password': 'REDACTED'}; password:REDACTED"),
    ("Password: xKcdHorse\nsecret: 9f8e", "Password: REDACTED\nsecret: REDACTED"),
    ("Proxy-Authorization: letmein", "Proxy-Authorization: REDACTED"),
    ("Authorization: Token letmein", "Authorization: Token REDACTED"),
    ("NEPTUNE_API_TOKEN=eyJhcGlf, x", "NEPTUNE_API_TOKEN=REDACTED, x"),
    ("AccountName=me;AccountKey=Zm9v+a/b==;Suffix=x", "AccountName=me;AccountKey=REDACTED;Suffix=x"),
    ("SharedAccessKey=Zm9v+a/b==", "SharedAccessKey=REDACTED"),
    ("upload --hub-token a1B2c3D4e5 --yes", "upload --hub-token REDACTED --yes"),
    ("Command '['up', '--token', 'a1B2c3D4e5']' failed", "Command '['up', '--token', 'REDACTED']' failed"),
    ('{"token": "a1B2c3D4e5f6G7h8I9j0"}', '{"token": "REDACTED"}'),
    ("hf_abcdefghijklmnopqrstuvwx", "REDACTED"),
    ("ghp_abcdefghijklmnopqrstuv0123 x", "REDACTED x"),
    ("AKIAABCDEFGHIJKLMNOP", "REDACTED"),
    ("eyJhbGciOiJI.eyJzdWIiOiIx.sig-nature", "REDACTED"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nx", "REDACTED\nx"),
]
# What only looks like it.
HARMLESS = [
    "https://host:8080/a@b",
    "https://host/x.jsonl?download=true&id=42",
    "hf://datasets/org/name@revision/x.jsonl",
    "https://huggingface.co/org/model#license",
    "max_new_tokens=3, pad_token: x, new_tokens: [a], token_adapter",
    "HTTP Basic authentication failed; the bearer of news",
    "token: 1234567890123456789012, token=<|reserved_special_token_12|>, token: unbelievably-long-words",
    "give --token or --hub-token, or --max-new-tokens 128000000; No such option: --token (Possible options: --data)",
    "tokens per second: 12; a key: value; the author: me; secretary",
    "model.layers.0.self_attn.q_proj.weight [32, 32]",
    "models/sk-slovak-gpt-small-v2, sk-learn-text-classification/rows.jsonl",
    "I lost my password: reset it, please. Password: Forgotten!",
    "The secret: practice. A passphrase:\nfour words; password: don't share it",
    'the secret: garden\\n, {"text": "The secret: garden","label": 1}, [\'a password: swordfish\'] (my secret: tea)',
    "<p>The secret: garden</p> said: \u201cthe secret: garden.\u201d The secret: \u2014 patience",
    "Cookie: mix flour and sugar, then bake",
    "Authorization: required for all",
    "Basic Programming, basic JavaScript, Bearer Architecture",
]


def test_redact_texts() -> None:
    for text, expected in TEXTS:
        assert redact(text) == expected
        assert redact(expected) == expected  # a stored recipe is compared with the same recipe redacted again
    assert [redact(text) for text in HARMLESS] == HARMLESS


def test_redact_variables_that_only_sound_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZER", "Qwen/Qwen3-0.6B")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Ann Lee 2nd")
    monkeypatch.setenv("SERVICE_AUTHORIZATION", "k3y-0f-service")
    assert redact("Ann Lee 2nd has Qwen/Qwen3-0.6B, k3y-0f-service") == "Ann Lee 2nd has Qwen/Qwen3-0.6B, REDACTED"


def test_redact_ends_for_long_texts_of_hyphens() -> None:
    # A tenth of these texts took minutes, in a time that grew with the square of their length: now it would be hours.
    for text in ("a-" * 200_000, "sk-" * 200_000, "secret-" * 100_000):
        redact(text)


def test_redact_values_retains_types_and_keys() -> None:
    value = {"path": "https://u:p@h/", "api_key": "abc", "pad_token": "<pad>", "n": [1, None, ("s3://a:b@c", 2.5)]}
    expected = {"path": "https://REDACTED@h/", "api_key": "REDACTED", "pad_token": "<pad>"}
    assert redact(value) == expected | {"n": [1, None, ("s3://REDACTED@c", 2.5)]}
    rows = [{"token": "a1B2c3D4e5f6G7h8I9j0"}, {"token": "<s>"}]  # a credential, and a word of a text
    assert redact(rows) == [{"token": "REDACTED"}, {"token": "<s>"}]


def test_redact_values_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "s3cr3t-value/with+signs==")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2)
    for name, value in (("A_TOKEN", "training"), ("B_KEY", "12345678"), ("C_AUTH_SOCK", str(tmp_path))):
        monkeypatch.setenv(name, value)  # a word, a number and a path are found everywhere
    text = f"training 12345678 in {tmp_path}"
    assert redact(f"{text}: s3cr3t-value/with+signs==, {'0123456789abcdef' * 2}") == f"{text}: REDACTED, REDACTED"
    assert redact_address("x s3cr3t-value/with+signs==") == "x s3cr3t-value/with+signs=="  # for digests


def test_redact_error_with_its_causes() -> None:
    try:
        try:
            raise OSError("https://u:p@h/ is closed")
        except OSError as error:
            raise ValueError("password: hunter2", 3) from error
    except ValueError as error:
        redact_error(error)
        assert (str(error.args), str(error.__cause__)) == ("('password: REDACTED', 3)", "https://REDACTED@h/ is closed")
    assert str(InputError("https://u:p@h/", hint="?")).startswith("https://REDACTED@h/")


@pytest.mark.parametrize("kind", ["RuntimeError", "RunError"])
def test_main_prints_an_exception_that_no_run_has_recorded_without_credentials(
    kind: str, tmp_path: Path, ftcli: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fails = f"raise {kind}(recipe.data.train.path + ' is closed, password: ' + 'hunter%d' % 2)"
    imported = "from ftcli.runtime.errors import RunError\n"
    (tmp_path / "task.py").write_text(
        imported + TASK.replace("super().__init__(recipe, options)\n        self.steps = 0", fails)
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe_of("m", task="./task.py")))
    code, output = ftcli("check", "r.yaml", "--data")
    assert code == 1 and "https://REDACTED@h/a.jsonl?sig=REDACTED is closed, password: REDACTED" in output, output
    assert "u:p" not in output and "hunter2" not in output


def test_record_failure_removes_credentials_from_the_exception_and_from_its_record(tmp_path: Path) -> None:
    for number, error in enumerate((ValueError("https://u:p@h/"), FileNotFoundError(2, "is gone", "https://u:p@h/"))):
        folder = RunFolder(tmp_path / str(number))
        folder.create()
        with pytest.raises(type(error)) as caught, record_failure(folder):
            raise error
        assert "https://REDACTED@h/" in str(caught.value) and "u:p" not in str(caught.value)
        record = (folder.errors / "rank-0.json").read_text()
        assert "https://REDACTED@h/" in json.loads(record)["message"] and "u:p" not in record


def test_record_failure_removes_credentials_that_stand_in_lines_of_code(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="boom"), record_failure(folder):
        raise ValueError("boom" if "https://u:p@h/" else "")
    record = (folder.errors / "rank-0.json").read_text()
    assert "https://REDACTED@h/" in record and "u:p" not in record


def recipe_of(weights: str | Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = minimal_values(
        "pretrain",
        model={"name": str(weights)},
        data={"train": "https://u:p@h/a.jsonl?sig=1", "streaming": True, "max_length": 16},
        batch={"global_size": 2},
        train={"max_steps": 4},
    )
    return Recipe.model_validate(values | changes)


def test_redaction_with_a_stored_recipe_is_compared_without_credentials() -> None:
    recipe = recipe_of("m")
    stored = stored_form(recipe)
    assert is_redacted(stored.data.train_sources[0].path) and stored_form(stored) == stored
    assert stored_form(recipe_of("m", data={"train": "x.jsonl"})) == recipe_of("m", data={"train": "x.jsonl"})
    renewed = recipe_of("m", data=recipe.data.model_dump() | {"train": "https://v:q@h/a.jsonl?sig=2"})
    other = recipe_of("m", data=recipe.data.model_dump() | {"train": "https://u:p@h/b.jsonl?sig=1"})
    for written in (stored, recipe):  # by this ftcli, and by one that did not redact
        state = {"recipe": written.model_dump(mode="json"), "step": 1, "data": {"rows": None, "fingerprint": ""}}
        assert recipe_changes(state, renewed) == ([], [])
        (moving,), _ = recipe_changes(state, other)
        assert moving == (
            "data.train.path: 'https://REDACTED@h/a.jsonl?sig=REDACTED' -> 'https://REDACTED@h/b.jsonl?sig=REDACTED'"
        )
    assert labels_of(recipe.data.train_sources) == ["https://REDACTED@h/a.jsonl?sig=REDACTED"]
    with pytest.raises(InputError, match="its credentials were not stored with the run"):
        file_system(stored.data.train_sources[0].path)


def test_workers_get_credentials_by_a_private_file(tmp_path: Path) -> None:
    recipe = recipe_of("m", model={"name": "m", "trust_remote_code": True})
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe_of("m", data={"train": "x.jsonl"})))
    folder = RunFolder(tmp_path / "run")
    secret = "data.train.path=https://u:p@h/a.jsonl"
    for given, overrides in ((recipe, ()), (tmp_path / "r.yaml", (secret,))):
        loaded = recipe if given is recipe else load_recipe(tmp_path / "r.yaml", overrides)
        with worker_recipe.recipe_for_workers(given, overrides, loaded, folder, ONE_MACHINE) as (path,):
            assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
            assert load_recipe(path) == loaded
        assert not Path(path).exists()
    assert "u:p" not in (folder.path / "recipe.yaml").read_text()
    harmless = ("seed=3",)
    with worker_recipe.recipe_for_workers(tmp_path / "r.yaml", harmless, recipe, folder, ONE_MACHINE) as arguments:
        assert arguments == [str(tmp_path / "r.yaml"), "--set=seed=3"]


# Ten secrets, by where they are planted.
SECRETS = {
    "userinfo": "us3rinfo-Passw0rd",
    "query": "qu3ry-t0ken",
    "signature": "s1gnature-0f-a-request",
    "option": "0ption-api-key",
    "environment": "hf_enVir0nmentT0kenAbc",
    "tracker": "wandb0123456789abcdef0123456789abcdef012",
    "cloud": "cl0ud/Secret+Access=Key",
    "header": "h3ader-bearer-T0ken",
    "proxy": "pr0xy-Passw0rd",
    "cookie": "c00kie-session",
}
TASK = """
import os
from ftcli.tasks import pretrain
from ftcli.tasks.pretrain import Options as Base

class Options(Base):
    api_key: str = ""

class Task(pretrain.Task):
    def __init__(self, recipe, options):
        super().__init__(recipe, options)
        self.steps = 0

    def loss(self, model, batch):
        self.steps += 1
        if self.steps > 2 and "FAIL" in os.environ:
            secrets = " ".join(os.environ[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"))
            secrets += " Authorization: Bearer " + os.environ["FAIL"] + " via " + os.environ["HTTPS_PROXY"]
            raise RuntimeError(secrets + " Cookie: " + os.environ["CHOCOLATE"] + " " + self.recipe.data.train.path)
        return super().loss(model, batch)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve rows on this machine to any client with any credentials; yields host and port."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "rows.jsonl").write_text('{"text": "some words to train on"}\n' * 40)

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(tmp_path / "web"))

        def log_message(self, *given: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{served.server_port}"
        served.shutdown()


@pytest.fixture
def ftcli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs one command line in this process and gives (exit code, all that was printed)."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["ftcli", *arguments])
        with pytest.raises(SystemExit) as end:
            main(arguments)
        captured = capfd.readouterr()
        return int(end.value.code or 0), captured.out + captured.err

    return run


@pytest.mark.slow
def test_redaction_no_planted_secret_is_in_a_run_its_logs_or_its_export(
    tmp_path: Path, server: str, ftcli: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    model = save_tiny_causal(tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK)
    planted = {
        "HF_TOKEN": SECRETS["environment"],
        "WANDB_API_KEY": SECRETS["tracker"],
        "AWS_SECRET_ACCESS_KEY": SECRETS["cloud"],
        "HTTPS_PROXY": f"http://me:{SECRETS['proxy']}@proxy:8080",
        "CHOCOLATE": f"session={SECRETS['cookie']}",
        "FAIL": SECRETS["header"],
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    address = f"http://me:{SECRETS['userinfo']}@{server}/rows.jsonl?token={SECRETS['query']}"
    signed = f"{address}&X-Amz-Signature={SECRETS['signature']}"
    recipe = recipe_of(
        model,
        task="./task.py",
        task_options={"api_key": SECRETS["option"]},
        data={"train": address, "streaming": True, "max_length": 16},
        checkpoint={"every_steps": 1},
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    command = ["train", "r.yaml", "--cpu", "--output", "run", "--set", f"data.train.path={signed}"]
    code, logged = ftcli(*command)
    assert code == 1 and "Bearer REDACTED" in logged and "REDACTED@proxy" in logged
    monkeypatch.delenv("FAIL")
    code, more = ftcli("train", "r.yaml", "--cpu", "--output", "other", "--set", "data.train.path=http://a:b@[/x")
    assert code == 2 and "http://REDACTED@[/x" in more
    code, resumed = ftcli(*command[:-1], f"data.train.path={signed}-renewed", "--resume", "auto")
    assert code == 0 and "resumed after step 2" in resumed, resumed
    checkpoint = checkpoints_of(tmp_path / "run")[-1]
    assert read_state(checkpoint)["recipe"]["task_options"] == {"api_key": "REDACTED"}
    code, exported = ftcli("export", str(checkpoint), "out", "--trust-remote-code")
    assert code == 0 and "REDACTED" in (tmp_path / "out" / "README.md").read_text()
    code, shown = ftcli("show", str(checkpoint))
    assert code == 0 and "REDACTED" in shown
    assert "REDACTED" in json.loads((tmp_path / "run" / "environment.json").read_text())["command"][-3]
    files = [path for name in ("run", "out", "other") for path in (tmp_path / name).rglob("*") if path.is_file()]
    places = {str(path): path.read_bytes() for path in files}
    places |= {"log": "".join((logged, more, resumed, exported, shown)).encode()}
    leaks = [(name, place) for name, secret in SECRETS.items() for place in places if secret.encode() in places[place]]
    assert len(files) > 20 and leaks == []

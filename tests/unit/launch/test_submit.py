"""Jobs of `ftcli submit`: their text, the checks before, and the arguments of the cluster's programs.

The jobs themselves run in tests/slurm, which has a target of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import ftcli
from ftcli.launch.job_scripts import job_name, parse_placeholders, parse_time
from ftcli.runtime.errors import InputError, RunError

from ...support.recipes import recipe_values
from ...support.runner import MakeInputs, RunCli

SCHEMAS = Path(__file__).resolve().parents[2] / "fixtures" / "kubernetes.json"
TOKEN = "hf_" + "a1b2c3d4e5f6g7h8"
CLUSTER = ("--placeholder", "image=registry.example/ftcli:1", "--placeholder", "claim=files")


@pytest.fixture(scope="module")
def folder(make_inputs: MakeInputs) -> Path:
    return make_inputs({"recipe.yaml": recipe_values()})


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder the only one on PATH; a test puts programs there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put_program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text("#!/bin/sh\n" + text)
    (folder / name).chmod(0o755)


def script(**options: Any) -> str:
    options = {"system": "slurm", "dry_run": True} | options
    return ftcli.submit("recipe.yaml", **options).script


def assert_refused(message: str, **options: Any) -> None:
    with pytest.raises(InputError) as caught:
        script(**options)
    assert message in str(caught.value)


def test_submit_for_slurm_writes_the_requested_resources_and_commands(folder: Path) -> None:
    text = script(profile="fsdp", nodes=2, gpus_per_node=3, time="36:30", overrides=["train.max_steps=8"])
    for line in ("--job-name=recipe", "--nodes=2 --ntasks-per-node=1", "--gpus-per-node=3", "--time=36:30:00"):
        assert f"#SBATCH {line}\n" in text
    run = f"{folder}/recipe.yaml --profile fsdp --num-processes 6 --set=train.max_steps=8"
    assert f"-m ftcli check {run} || exit\n" in text
    assert "-m ftcli doctor --profile fsdp --num-processes 6 || exit\n" in text
    assert f"-m ftcli train {run} --output {folder}/runs/recipe --resume auto\n" in text
    assert '--machine-rank "$SLURM_NODEID"' in text
    assert text.index("check") < text.index("doctor") < text.index("train ")


def test_submit_on_the_cpu_books_no_gpu_and_passes_cpu_on() -> None:
    text = script(profile="ddp", cpu=True)
    assert "gpus" not in text and "--profile ddp --num-processes 2 --cpu" in text


def test_submit_writes_values_with_spaces_and_quotes_as_one_shell_word() -> None:
    text = script(overrides=["evaluate.generate.prompts=[it's $HOME]"])
    line = next(line for line in text.splitlines() if "ftcli check" in line).partition(" -m ftcli ")[2]
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {line.removesuffix(' || exit')}"], capture_output=True)
    assert "--set=evaluate.generate.prompts=[it's $HOME]" in words.stdout.decode().splitlines()


@pytest.mark.parametrize("options", [{}, {"profile": "ddp", "nodes": 2, "gpus_per_node": 1, "time": "0:10"}])
def test_submit_for_slurm_writes_a_script_that_bash_accepts(options: dict[str, Any]) -> None:
    ended = subprocess.run(["bash", "-n"], input=script(**options), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_submit_signals_before_half_of_a_short_time() -> None:
    assert "--signal=USR1@60\n" in script(time="0:02") and "--signal=USR1@120\n" in script(time="4:00")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "4h"}, "--time 4h: not a time in hours and minutes"),
        ({"time": "0:00"}, "--time 0:00"),
        ({"nodes": 0}, "--nodes is 0"),
        ({"nodes": 2}, "several machines need a profile"),
        ({"nodes": 1, "profile": "fsdp_multi_node", "gpus_per_node": 1}, "is for 2 machines, --nodes is 1"),
        ({"nodes": 2, "profile": "single"}, "profile single runs on one machine"),
        ({"gpus_per_node": 2}, "2 GPUs need a distributed profile"),
        ({"gpus_per_node": 2, "cpu": True}, "on the CPU: --cpu without this option"),
        ({"profile": "fsdp"}, "give --gpus-per-node"),
        ({"profile": "ddp", "gpus_per_node": 4}, "4 processes"),
        ({"overrides": ["data.train=absent.jsonl"]}, "absent.jsonl"),
        ({"overrides": ["optimizer.learning_rat=1"], "profile": "fsdq"}, "'fsdq' is neither a profile file nor"),
        ({"placeholders": {"nodes": "3"}}, "--placeholder nodes: ftcli sets this placeholder itself"),
        ({"placeholders": {"partion": "gpu"}}, "--placeholder partion: slurm.sh.jinja has no such placeholder"),
        ({"placeholders": {"partion": "gpu"}}, "did you mean 'partition'?"),
        ({"template": "absent.sh"}, "--template absent.sh: No such file"),
    ],
)
def test_submit_refuses_what_cannot_run(options: dict[str, Any], message: str) -> None:
    assert_refused(message, **options)


def test_submit_reports_problems_of_recipe_and_profile_together() -> None:
    assert_refused("did you mean 'learning_rate'?", overrides=["optimizer.learning_rat=1"], profile="fsdq")


def test_submit_leaves_what_needs_a_gpu_to_the_check_in_the_job() -> None:
    assert "#SBATCH --gpus-per-node=1" in script(overrides=["precision=fp8"])
    assert_refused("precision fp8", overrides=["precision=fp8", "adapter.type=lora"], cpu=True)


@pytest.mark.parametrize(
    "options", [{"overrides": [f"output=s3://me:{TOKEN}@bucket"]}, {"placeholders": {"ftcli": TOKEN}}]
)
def test_submit_refuses_a_credential_in_the_script_and_does_not_repeat_it(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        script(**options)
    assert "would hold a credential" in str(caught.value) and TOKEN not in str(caught.value)


def test_submit_refuses_the_value_of_a_secret_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "Zx81-Spectrum48")
    assert_refused("would hold a credential", placeholders={"ftcli": "env KEY=Zx81-Spectrum48 ftcli"})


def test_submit_with_an_own_template_fills_it(tmp_path: Path) -> None:
    (tmp_path / "mine.sh").write_text("{{ name }} {{ queue }} {{ num_processes }}: {{ train }}\n")
    text = script(
        template=tmp_path / "mine.sh", placeholders={"queue": "gpu", "ftcli": "run ftcli"}, output="runs/My_1"
    )
    assert text.startswith("my-1 gpu 1: run ftcli train ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ queue }} {{ other }}", "no value for placeholder queue, other"),
        ("a\n{{ name", "mine.sh:2: the template is wrong"),
        ("{{ 1 / 0 }}", "the template is wrong: division by zero"),
        ("{{ name.__class__.__mro__ }}", "is unsafe"),
    ],
)
def test_submit_with_a_wrong_template_names_the_place(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.sh").write_text(text)
    assert_refused(message, template=tmp_path / "mine.sh")


def kubernetes_objects(**options: Any) -> dict[str, Any]:
    placeholders = {"image": "registry.example/ftcli:1", "claim": "files"} | options.pop("placeholders", {})
    text = script(system="kubernetes", placeholders=placeholders, **options)
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


def api_problems(item: dict[str, Any]) -> list[str]:
    """Return where an object differs from the schema of the Kubernetes API, which allows no unknown key."""
    schemas = json.loads(SCHEMAS.read_text())
    validator = jsonschema.Draft202012Validator(schemas[item["kind"]] | {"$defs": schemas["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(item)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cpu": True, "placeholders": {"cpus": "4", "memory": "16Gi"}},
        {"profile": "fsdp", "nodes": 2, "gpus_per_node": 3, "time": "4:00", "overrides": ["task_options={}"]},
    ],
)
def test_submit_for_kubernetes_writes_objects_of_the_api(options: dict[str, Any]) -> None:
    objects = kubernetes_objects(**options)
    assert list(objects) == ["Service", "Job"]
    assert [problem for item in objects.values() for problem in api_problems(item)] == []
    broken = objects["Job"] | {"spec": objects["Job"]["spec"] | {"parallel": 1}}
    assert "parallel" in api_problems(broken)[0]


def test_submit_for_kubernetes_starts_one_pod_per_machine_and_again_after_75() -> None:
    spec = kubernetes_objects(profile="fsdp", nodes=2, gpus_per_node=3, time="4:00")["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["activeDeadlineSeconds"]) == ("Indexed", 2, 14400)
    rules = [(rule["action"], rule.get("onExitCodes")) for rule in spec["podFailurePolicy"]["rules"][1:]]
    assert rules == [
        ("Ignore", {"operator": "In", "values": [75]}),
        ("FailJob", {"operator": "NotIn", "values": [75]}),
    ]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 3}
    commands = container["args"][0]
    assert subprocess.run(["bash", "-n"], input=commands, text=True).returncode == 0
    assert "ftcli check recipe.yaml --profile fsdp --num-processes 6 || exit\n" in commands
    assert (
        "exec ftcli train recipe.yaml --profile fsdp --num-processes 6 --output runs/recipe --resume auto" in commands
    )
    assert "--main-process-ip recipe-0.recipe" in commands


def test_submit_for_kubernetes_keeps_dollar_signs_of_values() -> None:
    text = "evaluate.generate.prompts=['Solve $$x$$ for $(HOSTNAME)']"
    spec = kubernetes_objects(profile="fsdp", nodes=2, gpus_per_node=1, overrides=[text])["Job"]["spec"]
    (commands,) = spec["template"]["spec"]["containers"][0]["args"]
    found = re.sub(
        r"\$(\$|\(\w+\))", lambda match: "$" if match[1] == "$" else "of the pod", commands
    )  # as Kubernetes does
    assert found.count("$$x$$ for $(HOSTNAME)") == 2
    assert '"$JOB_COMPLETION_INDEX"' in found and "${machine[@]}" in found


def test_submit_for_kubernetes_refuses_a_profile_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    with pytest.raises(InputError, match="two.yaml is outside of the current folder"):
        kubernetes_objects(profile="~/two.yaml")


def test_submit_for_kubernetes_refuses_files_outside_of_the_folder(tmp_path: Path, folder: Path) -> None:
    recipe = recipe_values() | {"model": {"name": str(folder / "tied")}}
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(InputError, match="is outside of the current folder"):
        ftcli.submit(
            tmp_path / "far.yaml", system="kubernetes", dry_run=True, overrides=[f"data.train={folder}/chats.jsonl"]
        )


@pytest.mark.parametrize(("option", "program"), [("--slurm", "sbatch"), ("--kubernetes", "kubectl")])
def test_command_without_the_program_says_so_and_the_dry_run_works(
    option: str, program: str, programs: Path, run_cli: RunCli, folder: Path
) -> None:
    more = CLUSTER if option == "--kubernetes" else ()
    ended = run_cli("submit", "recipe.yaml", option, *more)
    assert ended.code == 2 and f"{option} needs the program {program}, which is not on PATH" in ended.err
    assert "--dry-run prints the job without" in ended.err and not (folder / "runs").exists()
    shown = run_cli("submit", "recipe.yaml", option, "--dry-run", *more)
    assert (shown.code, shown.err) == (0, "") and "ftcli check" in shown.out and not (folder / "runs").exists()


@pytest.mark.parametrize("time", ["4h", "90", "1:60", "0:00", "1-00:00", "4:00:00", ""])
def test_command_with_a_time_of_another_form_says_which_form_it_needs(time: str, run_cli: RunCli) -> None:
    ended = run_cli("submit", "recipe.yaml", "--slurm", f"--time={time}")
    assert (ended.code, ended.out) == (2, "")
    message = f"error: --time {time}: not a time in hours and minutes\n    write H:MM, such as 4:00 or 48:00\n"
    assert ended.err == message


def test_command_for_kubernetes_without_values_names_the_placeholders_that_need_one(run_cli: RunCli) -> None:
    ended = run_cli("submit", "recipe.yaml", "--kubernetes")
    assert ended.code == 2 and "error: --placeholder: no value for placeholder image, claim\n" in ended.err
    assert "give each a value: --placeholder image=VALUE" in ended.err


def test_command_gives_the_script_to_sbatch_and_prints_the_job(programs: Path, run_cli: RunCli, tmp_path: Path) -> None:
    put_program(programs, "sbatch", f'echo "$@" > {programs}/arguments\necho "4711;cluster"\n')
    ended = run_cli("submit", "recipe.yaml", "--slurm", "--output", tmp_path / "out" / "run")
    written = tmp_path / "out" / "run.slurm.sh"
    assert (ended.code, ended.out) == (0, "4711\n") and f"written: {written}" in ended.err
    assert (programs / "arguments").read_text() == f"--parsable {written}\n"
    assert written.read_text() == script(output=tmp_path / "out" / "run")


def test_command_shows_why_the_cluster_refused_the_job(programs: Path, run_cli: RunCli) -> None:
    put_program(programs, "kubectl", 'echo "error: no cluster" >&2\nexit 1\n')
    ended = run_cli("submit", "recipe.yaml", "--kubernetes", *CLUSTER, "--output", "runs/given")
    assert ended.code == 1 and ended.err.strip().endswith("given.kubernetes.yaml: error: no cluster")
    with pytest.raises(RunError):
        ftcli.submit("recipe.yaml", system="kubernetes", placeholders={"image": "a", "claim": "b"}, output="runs/again")


def test_submit_of_a_folder_outside_of_the_claim_is_refused_and_one_inside_is_relative(tmp_path: Path) -> None:
    claim = {"system": "kubernetes", "placeholders": {"image": "a", "claim": "b"}}
    assert " --output runs/x " in script(output=Path.cwd() / "runs" / "x", **claim)
    for outside in (tmp_path / "x", "../outside/x"):
        assert_refused("x is outside of the current folder", output=outside, **claim)
    assert " --output /workspace/runs/x " in script(output="/workspace/runs/x", **claim)
    Path("elsewhere").symlink_to(tmp_path)
    assert " --output elsewhere/x " in script(output="elsewhere/x", **claim)  # a link in the claim too
    (tmp_path / "mine.yaml").write_text("run: {{ train }} {{ image }} {{ claim }}\n")
    own = script(output="/mnt/scratch/x", template=tmp_path / "mine.yaml", **claim)
    assert " --output /mnt/scratch/x " in own, "a template of the user may mount other folders"


@pytest.mark.parametrize("options", [(), ("--slurm", "--kubernetes")])
def test_command_needs_exactly_one_system(options: tuple[str, ...], run_cli: RunCli) -> None:
    ended = run_cli("submit", "recipe.yaml", *options)
    assert ended.code == 2 and "give --slurm or --kubernetes" in ended.err


def test_job_name_of_any_folder_is_a_name_for_every_system() -> None:
    names = {"runs/My_Run.2": "my-run-2", "runs/2b": "run-2b", "runs/___": "run", "x" * 60: "x" * 40}
    assert {folder: job_name(Path(folder)) for folder in names} == names


def test_parse_time_returns_seconds() -> None:
    assert [parse_time(text) for text in ("0:01", "4:00", "100:59")] == [60, 14400, 363540]


def test_parse_placeholders_needs_a_name_and_a_value() -> None:
    assert parse_placeholders(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    with pytest.raises(InputError, match="--placeholder gpu: not NAME=VALUE"):
        parse_placeholders(["gpu"])

"""`ftcli doctor` with several processes: which rank or pair is named, and what each rank exchanges."""

from __future__ import annotations

from ftcli.hardware.collective_exercise import partners
from ftcli.launch.collective_check import Progress, diagnose
from ftcli.launch.torch_probe import kernel_facts

ONE = {0: 0, 1: 0, 2: 0, 3: 0}
TWO = {0: 0, 1: 0, 2: 1, 3: 1}
DONE = (9, "done")


def named(progress: Progress, machine_of: dict[int, int] = ONE) -> list[tuple[str, str]]:
    facts = diagnose(progress, machine_of, 15)
    assert all(fact.state == "wrong" and fact.remedy for fact in facts)
    return [(fact.topic, fact.text) for fact in facts]


def test_partners_let_each_pair_meet_once_and_both_agree() -> None:
    for world in range(2, 10):
        rounds = [list(partners(rank, world)) for rank in range(world)]
        assert len({len(one) for one in rounds}) == 1
        for turn in range(len(rounds[0])):
            for rank in range(world):
                other = rounds[rank][turn]
                assert other is None or (other != rank and rounds[other][turn] == rank)
        pairs = [(rank, other) for rank in range(world) for other in rounds[rank] if other is not None and rank < other]
        assert sorted(pairs) == [(low, high) for low in range(world) for high in range(low + 1, world)]


def test_diagnose_of_ranks_that_ended_finds_nothing() -> None:
    assert named(Progress(dict.fromkeys(ONE, DONE))) == []


def test_diagnose_of_a_rank_that_never_came_names_it_and_its_machine() -> None:
    waiting = Progress({0: (1, "join"), 1: (1, "join"), 3: (1, "join")})
    assert named(waiting) == [("rank 2", "never came within 15 s")]
    assert named(waiting, TWO) == [("rank 2 (machine 1)", "never came within 15 s")]


def test_diagnose_of_an_error_names_only_the_rank_that_failed() -> None:
    failed = Progress({0: (4, "all_reduce"), 1: (4, "all_reduce")}, errors={1: "all_reduce: killed by SIGKILL"})
    assert named(failed) == [("rank 1", "failed: all_reduce: killed by SIGKILL")]


def test_diagnose_of_a_pair_that_hangs_names_the_pair_and_not_those_that_wait_for_it() -> None:
    steps = {0: (2, "pair 0-3"), 3: (2, "pair 0-3"), 1: (3, "pair 1-3"), 2: (3, "pair 0-2")}
    assert named(Progress(steps)) == [("ranks 0-3", "do not answer each other within 15 s")]


def test_diagnose_of_a_frozen_process_names_its_rank() -> None:
    steps = dict.fromkeys(ONE, (5, "all_reduce"))
    assert named(Progress(steps, frozen={2})) == [
        ("rank 2", "does not answer in all_reduce: the process hangs"),
    ]


def test_diagnose_of_a_collective_names_the_late_rank_or_all() -> None:
    steps = dict.fromkeys(ONE, (6, "all_gather"))
    assert named(Progress(steps | {1: (5, "all_reduce")})) == [("rank 1", "does not answer in all_reduce within 15 s")]
    assert named(Progress(steps)) == [("collectives", "all ranks hang in all_gather within 15 s")]


def test_kernel_facts_of_a_kernel_that_cannot_be_used_tell_why() -> None:
    facts = {fact.topic: fact for fact in kernel_facts({"flash-attn 2": "ImportError: undefined symbol"}, on_gpu=True)}
    assert facts["flash-attn 2"].state == "look" and "undefined symbol" in facts["flash-attn 2"].text
    assert facts["liger-kernel"].state == "look" and facts["liger-kernel"].remedy == "pip install 'ftcli[kernels]'"
    (none,) = kernel_facts({}, on_gpu=False)
    assert none.state == "ok"

"""Which part of its lists the GPU suite takes in a run, and what results/<device>.json says of it."""

import json
import pathlib
import sys
from typing import Any

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
DEVICE = {
    "device": "A GPU",
    "architecture": "sm_90a",
    "description": "none",
    "device_code_hash": "new",
    "tests_hash": "new",
    "turns_in_all": "3",
}


@pytest.fixture
def gpu_test(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_test

    monkeypatch.setattr(gpu_test.gpu_results, "ROOT", tmp_path)
    return gpu_test


def run_once(gpu_test: Any, device: dict[str, str], fails: bool = False) -> dict[str, Any]:
    """A whole run of one job."""
    results = gpu_test.gpu_results
    number, passed = gpu_test.turn_to_take(results.read(device, "tests"), device)
    turn = gpu_test.Turn(number, int(device["turns_in_all"]), passed)
    job = gpu_test.Job("cpp", "Forward.Agrees", ran=True, failed=fails)
    results.write(device, "tests", gpu_test.content_of([job], 1.0, turn))
    return results.read(device, "tests")


def test_every_run_takes_the_next_turn_until_all_have_passed(gpu_test: Any) -> None:
    taken = [run_once(gpu_test, DEVICE) for _ in range(4)]
    assert [tests["turn"] for tests in taken] == [0, 1, 2, 0]
    assert [tests["turns"] for tests in taken] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert taken[-1]["turns_in_all"] == 3


def test_a_turn_that_failed_is_taken_again(gpu_test: Any) -> None:
    run_once(gpu_test, DEVICE)
    failed = run_once(gpu_test, DEVICE, fails=True)
    assert (failed["turn"], failed["turns"], failed["passed"]) == (1, [0], False)
    again = run_once(gpu_test, DEVICE)
    assert (again["turn"], again["turns"]) == (1, [0, 1])


@pytest.mark.parametrize("changed", ["device_code_hash", "tests_hash"])
def test_turns_of_other_device_code_or_tests_do_not_count(gpu_test: Any, changed: str) -> None:
    run_once(gpu_test, {**DEVICE, changed: "old"})
    tests = run_once(gpu_test, DEVICE)
    assert (tests["turn"], tests["turns"]) == (1, [1])


def test_each_part_names_what_it_belongs_to(gpu_test: Any) -> None:
    results = gpu_test.gpu_results
    run_once(gpu_test, DEVICE)
    results.write(DEVICE, "benchmarks", {"passed": True})
    names = {part: set(results.read(DEVICE, part)) for part in ("tests", "benchmarks")}
    assert {"device_code_hash", "tests_hash"} <= names["tests"]
    assert "device_code_hash" in names["benchmarks"] and "tests_hash" not in names["benchmarks"]
    whole = json.loads(results.path_of(DEVICE).read_text())
    assert whole["device"]["architecture"] == "sm_90a"


def test_the_suite_is_told_its_turn(gpu_test: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_TEST_TURN", "0")
    monkeypatch.setattr(sys, "argv", ["gpu_test.py", "--turn", "2", "--only", "cpp"])
    monkeypatch.setattr(gpu_test.gpu_results, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(gpu_test.gpu_results, "keep_bytecode", lambda: None)
    monkeypatch.setattr(gpu_test, "cpp_tests", lambda *_: ["Forward.Agrees"])
    told: list[str] = []

    def run_cpp(job: Any, timeout: float) -> None:
        told.append(gpu_test.environment()["ONEPASS_TEST_TURN"])
        job.ran = timeout > 0

    monkeypatch.setattr(gpu_test, "run_cpp", run_cpp)
    gpu_test.main()
    assert told == ["2"]
    monkeypatch.setattr(sys, "argv", ["gpu_test.py", "--turn", "3"])
    with pytest.raises(SystemExit, match="turn 3, must be from 0 to 2"):
        gpu_test.main()

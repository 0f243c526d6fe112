"""`python -m tests.golden record` and `check`: see README.md."""

import argparse
import sys
import time
import warnings

import torch

from tests.golden.cases import Case, all_cases
from tests.golden.checking import check, other_versions
from tests.golden.recording import PATH, Recording, commit_here, what_computes
from tests.golden.running import on_ranks
from tests.harness.ranks import RankPool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="run all cases and write golden.json")
    recorder.add_argument("--force", action="store_true", help="although files differ from the commit")
    recorder.add_argument("--counts", action="store_true", help="of the cases, keep the recorded bits: with --cases")
    checker = commands.add_parser("check", help="run cases and say what differs from golden.json")
    for command in (recorder, checker):
        command.add_argument(
            "--cases",
            nargs="+",
            metavar="WORDS",
            help="those that have all of these words, such as 'gpt2 ranks=2 stage=3'; several such lists are added up",
        )
    checker.add_argument("--siblings", action="store_true", help="compare bits with unsharded runs, not recorded ones")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of models that are odd on purpose
    pool = RankPool()
    started = time.monotonic()
    try:
        done = _record(pool, given) if given.command == "record" else _check(pool, given)
    finally:
        pool.stop()
    print(f"{time.monotonic() - started:.0f} s")
    return done


def _record(pool: RankPool, given: argparse.Namespace) -> int:
    """All cases, or some of them into the recording that there is, whose commit stays that of the others."""
    commit, clean = commit_here()
    if not clean and not given.force:
        print("record: files differ from the commit; commit them first, or say --force", file=sys.stderr)
        return 1
    if given.cases:
        recording = Recording.read()
        if not (given.counts or recording.is_of_such_a_machine()):
            print("record: bits of another machine cannot stand beside these:", file=sys.stderr)
            print(*other_versions(recording), sep="\n", file=sys.stderr)
            return 1
        cases = _with_words(recording, given.cases)
    else:
        recording = Recording(commit if clean else f"{commit} with changes", what_computes())
        cases = all_cases()
    for case, result in on_ranks(pool, cases):
        if given.cases and given.counts:
            recording.results[case]["counts"] = result["counts"]
            continue
        recording.note_torch_bits(case)
        recording.results[case] = result
    recording.write()
    print(f"{len(cases)} cases of {commit} are in {PATH.name}")
    return 0


def _with_words(recording: Recording, lists: list[str]) -> list[Case]:
    wanted = [words.split() for words in lists]
    return [case for case in recording.results if any(case.has(words) for words in wanted)]


def _check(pool: RankPool, given: argparse.Namespace) -> int:
    recording = Recording.read()
    cases = _with_words(recording, given.cases or [""])
    if not cases:
        print("check: no case has these words", file=sys.stderr)
        return 1
    verdict = check(pool, recording, cases, siblings=given.siblings)
    print(verdict)
    print(f"recorded from {recording.commit}")
    for line in other_versions(recording):
        print(f"  {line}")
    return 1 if verdict.found else 0


if __name__ == "__main__":
    sys.exit(main())

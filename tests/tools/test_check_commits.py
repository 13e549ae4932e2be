"""Commit subjects are an area and an imperative, within the length limit."""

import subprocess

import pytest

from tools.check_commits import BASE, offence, subjects


@pytest.mark.parametrize(
    "subject",
    [
        "buffers: end trajectories where the content of two writes breaks",
        "envs, collectors: keep the first error where closing raises, too",
        "remote buffers: draw again what was overwritten",
        "_os/files: pass descriptors on",
        "a: " + "x" * 69,
    ],
)
def test_an_area_and_an_imperative_are_accepted(subject):
    assert offence(subject) is None


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("a: " + "x" * 70, "73 characters"),
        ("add a gate", "expected <area>"),
        ("Buffers: add a gate", "expected <area>"),
        ("buffers: Add a gate", "expected <area>"),
        ("buffers: add a gate.", "expected <area>"),
        ("buffers:add a gate", "expected <area>"),
        ("buffers: adds a gate", "imperative"),
        ("buffers: added a gate", "imperative"),
        ("buffers: adding a gate", "imperative"),
    ],
)
def test_other_subjects_are_refused(subject, why):
    assert why in offence(subject)


def test_commits_since_the_base_are_read(tmp_path):
    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *names, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    assert subjects(tmp_path, BASE) is None
    for message in ("What there was", "a: add b", "c: drop d"):
        git("commit", "--quiet", "--allow-empty", "-m", message)
    base = git("rev-parse", "HEAD~2")
    assert [line.partition(" ")[2] for line in subjects(tmp_path, base)] == ["c: drop d", "a: add b"]
    assert subjects(tmp_path, BASE) is None
    assert subjects(tmp_path, git("rev-parse", "HEAD")) == []


def test_a_folder_without_a_history_has_no_subjects(tmp_path):
    assert subjects(tmp_path, BASE) is None

"""`lint_prose` finds idioms in docstrings, comments and pages, with their lines, and nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import lint_prose


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.py",
            '"""First.\n\nIt goes on.\n"""\nx = "it stands"  # nobody\n',
            ["a.py:3: goes on", "a.py:5: nobody"],
        ),
        ("a.py", 'def f():\n    """What is here."""\n', ["a.py:2: What is"]),
        ("a.md", "one\n```\nnobody\n```\ntwo beside\nthose of\n", ["a.md:5: beside", "a.md:6: those of"]),
        ("a.cc", "int stands; // of its own\n/* a\n one, say */\n", ["a.cc:1: of its own", "a.cc:3: , say"]),
    ],
)
def test_idioms_are_found_in_prose_only(tmp_path, monkeypatch, name, text, expected):
    monkeypatch.setattr(lint_prose, "ROOT", tmp_path)
    file = tmp_path / name
    file.write_text(text)
    words, found = lint_prose.counted(file)
    assert sorted(found) == sorted(expected) and words


@pytest.mark.parametrize(
    "text",
    [
        "what the",
        "what nobody",
        "whoever",
        "stand",
        "those in",
        "of their own",
        "go on",
        "as they are",
        ", say ",
    ],
)
def test_each_pattern_matches(text):
    assert lint_prose.IDIOM.search(text)


@pytest.mark.parametrize(
    "text", ["what happens", "a standing order", "those", "as it was", "we say", "besides"]
)
def test_similar_words_do_not_match(text):
    assert not lint_prose.IDIOM.search(text)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("One two. Three (four)? `Five` six", [2, 2, 2]),
        ("One\n\ntwo", [1, 1]),
        ("List:\n    - one two\n    - three", [1, 2, 1]),
        ("Args:\n    size: Rows.\n    key (str): A\n        key.", [1, 2, 4]),
        ("Do.\n\n>>> add(1,\n...     2)\n3\n\nAfter.", [1, 1]),
    ],
)
def test_docstrings_are_split_into_sentences(tmp_path, text, lengths):
    file = tmp_path / "a.py"
    file.write_text(f'"""{text}"""\n# One two three four.\n')
    found = [len(lint_prose.WORD.findall(sentence)) for _, sentence in lint_prose.sentences(file)]
    assert found == lengths


def test_a_share_of_long_sentences_above_the_recorded_one_fails(house):
    rates(house).write_text("".join(f"{part}\t120\t0\n" for part in lint_prose.PARTS))
    file = house.parents[1] / "src" / "a.py"
    file.write_text(f'"""{"word " * 31}. Two words."""\n')
    failed = run(house, "src")
    assert failed.returncode == 1 and "src: 50.00 long sentences in 100" in failed.stdout
    assert "src/a.py:1: 31 words" in failed.stdout


def test_all_parts_have_a_rate_and_rates_are_rounded_up():
    assert tuple(lint_prose.recorded()) == lint_prose.PARTS
    assert [lint_prose.rounded_up(rate) for rate in (1.0, 1.01, 1.1, 1.19)] == [1.0, 1.1, 1.1, 1.2]


@pytest.fixture
def house(tmp_path):
    """A repository with one page for each part: ten words, one idiom."""
    for part in lint_prose.PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.md").write_text("one two three four five six seven eight beside ten\n")
    script = tmp_path / "tools" / "lint_prose.py"
    script.write_text(Path(lint_prose.__file__).read_text())
    return script


def rates(house):
    return house.with_name("prose.tsv")


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, cwd=script.parents[1]
    )


def test_a_rate_above_the_recorded_one_fails_and_rates_are_never_raised(house):
    rates(house).write_text("".join(f"{part}\t120\t0\n" for part in lint_prose.PARTS))
    assert run(house).returncode == 0
    assert run(house, "--record").returncode == 0
    assert "docs\t100.0\t0.0\n" in rates(house).read_text()
    page = house.parents[1] / "docs" / "a.md"
    page.write_text(page.read_text() + "beside\n")
    failed = run(house, "--record", "docs")
    assert failed.returncode == 1 and "docs\t100.0\t0.0\n" in rates(house).read_text()
    assert "docs/a.md:2: beside" in failed.stdout and "docs: 181.82 idioms" in failed.stdout

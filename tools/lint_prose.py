"""Count idioms and long sentences in docstrings, comments and pages: `python tools/lint_prose.py [FOLDER ...]`.

For the given folders it prints each idiom (`PATTERNS`) and each sentence of a docstring with more than `LONG` words.
With `--changed` it does so for folders that differ from main. Then it prints both rates of folders. It fails if a part
of the repository exceeds a rate in `tools/prose.tsv`. `--record` lowers the rates there to the measured ones.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import math
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RATES = ROOT / "tools" / "prose.tsv"
PARTS = ("src", "cpp", "docs", "tests", "benchmarks", "examples", "tools")
PATTERNS = (
    r"\bwhat (is|are|has|stands|comes|came|becomes|became|an?|the|one|nobody|somebody|it|follows|can|did|does|was|makes"
    r"|each|every|they|others)\b",
    r"\b(whoever|nobody|somebody|anybody)\b",
    r"\bstands?\b",
    r"\bthose (of|that|which|in|with)\b",
    r"\bof (its|their|his|our) own\b",
    r"\bgo(es)? on\b",
    r"\bas (it|they) (is|are|come|comes|stand|stands|came)\b",
    r", say\b",
    r"\bbeside\b",
)
IDIOM = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.IGNORECASE)
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
WORD = re.compile(r"\S*\w\S*")
LONG = 30  # words
# Places in a docstring where a sentence ends without a full stop: before an empty line, a list item or an argument.
BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\*{0,2}\w+(?: \([^)]*\))?: ))")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'`)]*\s+")
DOCTEST = re.compile(r"^\s*>>>.*(?:\n(?!\s*\n).*)*", re.M)
SUFFIXES = (".py", ".md", ".cc", ".h")


@functools.cache
def prose(path: Path) -> list[tuple[int, str]]:
    """Return the pieces of prose in a file, with their first lines. Idioms and sentences are both searched in them."""
    return list(pieces(path))


def pieces(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each piece of prose in a file, with its first line."""
    text = path.read_text()
    if path.suffix == ".md":
        yield 1, FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.lineno, node.value.value
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    else:
        yield from (
            (text.count("\n", 0, found.start()) + 1, found.group()) for found in COMMENT.finditer(text)
        )


def counted(path: Path) -> tuple[int, list[str]]:
    """Return the number of words of prose in a file, and its idioms as "file:line: idiom"."""
    words, found = 0, []
    for line, text in prose(path):
        words += len(WORD.findall(text))
        for idiom in IDIOM.finditer(text):
            at = line + text.count("\n", 0, idiom.start())
            found.append(f"{path.relative_to(ROOT)}:{at}: {idiom.group()}")
    return words, found


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each sentence in the docstrings of a Python file, with the first line of its docstring."""
    if path.suffix == ".py":
        for line, text in prose(path):
            if not text.startswith("#"):
                for piece in BREAK.split(DOCTEST.sub("", text)):
                    yield from (
                        (line, sentence) for sentence in SENTENCE_END.split(piece) if sentence.strip()
                    )


def long_ones(path: Path) -> tuple[int, list[str]]:
    """Return the number of sentences in a file's docstrings, and the long sentences as "file:line: beginning"."""
    found = [(line, sentence.split(), len(WORD.findall(sentence))) for line, sentence in sentences(path)]
    name = path.relative_to(ROOT)
    return len(found), [
        f"{name}:{line}: {n} words: {' '.join(all_[:8])} ..." for line, all_, n in found if n > LONG
    ]


def part_of(path: Path) -> str:
    """Return the part of the repository that a file belongs to: its top folder, or `docs` for pages at the root."""
    folders = path.relative_to(ROOT).parts[:-1]
    return folders[0] if folders else "docs"


def files() -> list[Path]:
    found = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.suffix in SUFFIXES]
    return sorted([*found, *ROOT.glob("*.md")])


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def changed_folders() -> set[Path]:
    """Return the folders of files that differ from the merge base with main or that git doesn't track."""
    base = (git("merge-base", "HEAD", "main") or ["HEAD"])[0]
    names = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return {(ROOT / name).parent for name in names}


def recorded() -> dict[str, list[float]]:
    """Return the highest allowed rates of each part: idioms per 1,000 words, and long sentences per 100."""
    rows = [line.split("\t") for line in RATES.read_text().splitlines() if not line.startswith("#")]
    return {part: [float(rate) for rate in rates] for part, *rates in rows}


def rounded_up(rate: float) -> float:
    return math.ceil(rate * 10 - 1e-9) / 10


def main() -> None:
    """Print idioms, long sentences and rates; exit with status 1 if a rate is above its limit."""
    parser = argparse.ArgumentParser(description="Count idioms in docstrings, comments and pages.")
    parser.add_argument("folders", nargs="*", type=Path, help="print the idioms in these folders")
    parser.add_argument("--changed", action="store_true", help="print the idioms in folders with changes")
    parser.add_argument("--record", action="store_true", help="lower the recorded rates to the measured ones")
    options = parser.parse_args()
    shown = {folder.resolve() for folder in options.folders} | (
        changed_folders() if options.changed else set()
    )
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in files():
        words, idioms = counted(path)
        all_sentences, long = long_ones(path)
        for group in {part_of(path), path.parent.relative_to(ROOT).as_posix()}:
            counts[group].update(words=words, idioms=len(idioms), sentences=all_sentences, long=len(long))
        if path.parent in shown:
            print(*idioms, *long, sep="\n", end="\n" * bool(idioms or long))
    rates = {
        group: [
            1000 * found["idioms"] / (found["words"] or 1),
            100 * found["long"] / (found["sentences"] or 1),
        ]
        for group, found in counts.items()
    }
    for group, (idiom_rate, long_rate) in sorted(rates.items()):
        if options.changed or group in PARTS or ROOT / group in shown:
            print(f"{idiom_rate:6.2f} idioms in 1,000 words, {long_rate:5.1f} % long sentences: {group}")
    limits = recorded()
    if options.record:
        limits = {
            part: [min(*both) for both in zip(limits[part], map(rounded_up, rates[part]), strict=True)]
            for part in PARTS
        }
        lines = [f"{part}\t{limits[part][0]}\t{limits[part][1]}\n" for part in PARTS]
        RATES.write_text(
            "# part\tmost idioms in 1,000 words of prose\tmost sentences over 30 words in 100 of docstrings; "
            "a rate may only fall\n" + "".join(lines)
        )
    names = ("idioms in 1,000 words", "long sentences in 100")
    above = [
        f"{part}: {rate:.2f} {name}, at most {limit} are allowed: rewrite some"
        for part in PARTS
        for rate, limit, name in zip(rates[part], limits[part], names, strict=True)
        if rate > limit
    ]
    print(*above, sep="\n", end="\n" * bool(above))
    sys.exit(bool(above))


if __name__ == "__main__":
    main()

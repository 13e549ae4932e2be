"""Check the subjects of the commits since `BASE`: `<area>: <imperative>`, at most 72 characters.

If the history lacks `BASE` (an archive, a shallow clone), nothing is checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = "436a08207b5d3b3921febaa2ddd77f2a87f1082a"
"""The last commit before the rule."""
MOST_CHARACTERS = 72
SUBJECT = re.compile(r"[a-z_][\w./-]*(,? [a-z_][\w./-]*)*: ([a-z][\w-]*)( .*)?[^.]")
NOT_IMPERATIVE = re.compile(r".*(ing|[^es]ed|[^s]s)$")
IMPERATIVES = {"bring", "string", "embed", "shed", "bias", "focus", "canvas"}


def offence(subject: str) -> str | None:
    """Return a message about the rule that a subject breaks, or None."""
    if len(subject) > MOST_CHARACTERS:
        return f"{len(subject)} characters, at most {MOST_CHARACTERS} are allowed"
    found = SUBJECT.fullmatch(subject)
    if found is None:
        return "expected <area>: <imperative>, in lower case, without a full stop"
    verb = found.group(2)
    if NOT_IMPERATIVE.match(verb) and verb not in IMPERATIVES:
        return f"expected an imperative (add, not adds or adding), got {verb!r}"
    return None


def subjects(root: Path, base: str) -> list[str] | None:
    """Return "hash subject" of each commit since `base` except merges, or None if the history lacks `base`."""
    log = ["git", "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    try:
        inside = subprocess.run(
            ["git", "merge-base", "--is-ancestor", base, "HEAD"], cwd=root, capture_output=True
        )
        done = subprocess.run(log, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if inside.returncode == 0 and done.returncode == 0 else None


def main() -> None:
    found = subjects(ROOT, BASE)
    if found is None:
        print(f"no history since {BASE}: subjects of commits are not checked")
        return
    offences = [f"{line}: {why}" for line in found if (why := offence(line.partition(" ")[2]))]
    print("\n".join(offences) or f"{len(found)} subjects of commits: fine")
    sys.exit(bool(offences))


if __name__ == "__main__":
    main()

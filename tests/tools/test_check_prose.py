"""`check_prose` distinguishes changes of docstrings, comments or layout from changes of code, in Python and C++."""

import pytest

from tools import check_prose

PYTHON = 'class A:\n    """One."""\n    x = 1\n    """Two."""\n\n    def f(self):\n        return "three"  # four\n'
CPP = 'int f(int a) { return g("// one", a); }  // two\n'


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("a.py", PYTHON, PYTHON.replace("One", "A\nb").replace("Two", "C").replace("# four", "\n# five")),
        ("a.cc", CPP, '/* a "b */ int f( int a ) {\n  return g("// one", a);\n}\n'),
    ],
)
def test_changes_of_prose_and_layout_leave_the_code_equal(name, text, changed):
    assert check_prose.code(name, text) == check_prose.code(name, changed)


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("a.py", PYTHON, PYTHON.replace("three", "four")),
        ("a.py", PYTHON, PYTHON.replace("x = 1", "x = 2")),
        ("a.cc", CPP, CPP.replace("// one", "// two")),
        ("a.cc", CPP, CPP.replace("int a", "inta")),
    ],
)
def test_changes_of_code_and_of_texts_that_code_uses_are_found(name, text, changed):
    assert check_prose.code(name, text) != check_prose.code(name, changed)

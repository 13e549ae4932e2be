"""`overridden` detects the methods that a user's class replaces."""

from gleanrl._util import is_native, overridden


class Base:
    def step(self):
        return 1

    def reset(self):
        return 2

    @property
    def size(self):
        return 3

    kind = "base"


class Derived(Base):
    def step(self):
        return 10

    kind = "derived"


class Plain(Base):
    def other(self):
        return 4


class Mixin:
    def reset(self):
        return 20


class Mixed(Mixin, Base):
    pass


def test_methods_of_subclasses_mixins_and_attributes_count():
    names = ("step", "reset", "size", "kind")
    assert overridden(Derived, *names, of=Base) == ("step", "kind")
    assert overridden(Derived(), *names, of=Base) == ("step", "kind")
    assert overridden(Mixed(), *names, of=Base) == ("reset",)
    assert overridden(Plain, *names, of=Base) == () and overridden(Base, *names, of=Base) == ()
    assert overridden(Plain, "other", of=Base) == ("other",)
    assert overridden(Plain, "missing", of=Base) == ()


def test_an_object_s_own_method_counts():
    one = Plain()
    one.step = lambda: 5
    assert overridden(one, "step", "reset", of=Base) == ("step",)
    assert overridden(Plain(), "step", of=Base) == ()


def test_is_native_is_false_for_subclasses_that_override():
    assert is_native(Plain(), "step", "reset", of=Base) and is_native(Base, of=Base)
    assert not is_native(Derived, "step", of=Base) and is_native(Derived, "reset", of=Base)
    assert not is_native(Mixin(), "step", of=Base) and not is_native(Mixin, of=Base)


def test_attributes_made_by_getattr_are_no_overrides():
    class Chatty(Base):
        def __getattr__(self, name):
            return lambda: name

    assert overridden(Chatty(), "step", "missing", of=Base) == ()

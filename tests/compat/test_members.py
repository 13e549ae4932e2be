"""Members that other releases have: asking for one says what to use."""

from __future__ import annotations

import pytest

import gleanrl.collectors
import gleanrl.data
import gleanrl.envs
from gleanrl.compat import members
from gleanrl.compat.members import UNSERVED_MEMBERS, UnservedMembers, refuse_members
from gleanrl.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
from gleanrl.errors import UnservedMemberError

PUBLIC = {
    name: cls
    for module in (gleanrl.collectors, gleanrl.data, gleanrl.envs)
    for name, cls in vars(module).items()
}


@pytest.mark.parametrize("row", UNSERVED_MEMBERS, ids=lambda row: f"{row.owner}-{row.names.split()[0]}")
def test_rows_are_of_public_classes_and_of_what_these_have_not(row):
    for name in row.names.split():
        if "(" not in name:
            assert not hasattr(PUBLIC[row.owner], name), name


def test_asking_says_what_to_use():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    with pytest.raises(
        UnservedMemberError, match=r"^ReplayBuffer\.read_all_in_order isn't served: read rb\[:end\]"
    ):
        buffer.read_all_in_order()
    with pytest.raises(AttributeError, match="every slot is counted"):
        RoundRobinWriter().generations_of(0)
    assert not hasattr(buffer, "query") and getattr(buffer, "query", None) is None


def test_what_users_define_or_assign_counts():
    class Mine(ReplayBuffer):
        def query(self) -> int:
            return 3

    buffer = Mine(storage=LazyTensorStorage(3))
    buffer.client = 4
    assert (buffer.query(), buffer.client) == (3, 4)


def test_what_a_users_class_behind_ours_defines_counts():
    class Theirs:
        query = 3

        def start(self) -> int:
            return 4

        @property
        def client(self) -> int:
            return 5

    class Mine(ReplayBuffer, Theirs):
        pass

    buffer = Mine(storage=LazyTensorStorage(3))
    assert (buffer.query, buffer.start(), buffer.client) == (3, 4, 5)
    with pytest.raises(UnservedMemberError, match="Mine.shutdown"):
        buffer.shutdown()


def test_classes_of_others_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(members, "UNSERVED_MEMBERS", (UnservedMembers("Theirs", "thing", "no"),))
    theirs, ours = (
        type("Theirs", (), {"__module__": module}) for module in ("elsewhere", "gleanrl.elsewhere")
    )
    for cls in (theirs, ours, len):
        refuse_members(cls)
    assert "thing" not in vars(theirs) and "thing" in vars(ours)

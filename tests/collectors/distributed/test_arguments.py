"""Keywords of collectors with nodes are translated or refused."""

from __future__ import annotations

import pytest

from gleanrl.collectors import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from gleanrl.collectors.distributed.arguments import (
    class_of,
    count_of,
    environments_of,
    keywords_of,
    options_of_actors,
)
from gleanrl.errors import InvalidArgumentError, LengthError, MissingArgumentError, UnsupportedError
from tests.fakes_base import CountingEnv


class Iterates(SyncDataCollector):
    def iterator(self):
        return iter([])


class Plain(MultiSyncDataCollector):
    pass


def test_collector_class_names_are_resolved():
    found = [class_of(name, 1) for name in ("single", "sync", "async")]
    assert found == [SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector]
    assert class_of(Plain, 3) is Plain
    with pytest.raises(InvalidArgumentError, match="collector_class: expected one of"):
        class_of("double", 1)
    with pytest.raises(UnsupportedError, match="not with <class 'dict'>"):
        class_of(dict, 1)
    with pytest.raises(UnsupportedError, match=r"Iterates replaces \('iterator',\)"):
        class_of(Iterates, 1)
    assert class_of(aSyncDataCollector, 1) is aSyncDataCollector
    for kind in ("single", aSyncDataCollector):
        with pytest.raises(UnsupportedError, match="num_workers_per_collector=2"):
            class_of(kind, 2)


def test_create_env_fn_is_split_among_nodes_and_workers():
    assert count_of([CountingEnv] * 3, None) == 3 and count_of(CountingEnv, 2) == 2
    with pytest.raises(MissingArgumentError, match="the number of nodes is unknown"):
        count_of(CountingEnv, None)
    with pytest.raises(InvalidArgumentError, match="got none"):
        count_of([], None)
    single = environments_of(CountingEnv, 2, 0, [None, None])
    assert all(type(one()) is CountingEnv for one in single)
    with_workers = environments_of([CountingEnv, [CountingEnv] * 2], 2, 2, [None, None])
    assert [len(node) for node in with_workers] == [2, 2]
    env = CountingEnv()
    shared = environments_of([env, env], 2, 0, [None, None])
    assert shared[0]() is env and shared[1]() is not env
    with pytest.raises(LengthError, match="create_env_fn"):
        environments_of([CountingEnv], 2, 0, [None, None])


def test_keywords_and_actor_options_are_split_among_nodes():
    assert keywords_of({"cat_results": 0}, 2) == [{"cat_results": 0}] * 2
    assert keywords_of(None, 1) == [{}]
    with pytest.raises(UnsupportedError, match="collector_kwargs: .'total_frames'"):
        keywords_of([{}, {"total_frames": 3}], 2)
    assert options_of_actors([None, {"num_gpus": 1}], 2) == [{"num_cpus": 1}, {"num_cpus": 1, "num_gpus": 1}]
    with pytest.raises(UnsupportedError, match="max_task_retries"):
        options_of_actors({"max_task_retries": 3}, 1)
    with pytest.raises(LengthError, match="remote_configs"):
        options_of_actors([{}], 2)

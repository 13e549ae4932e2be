"""Samplers, writers and storages that users wrote for other releases, with the methods of those releases only."""

from __future__ import annotations

import torch

from gleanrl.data.replay_buffers import Sampler, Storage, Writer


class Told(Sampler):
    """Draws from torch's global generator and records the calls that it receives."""

    def __init__(self):  # many such classes don't call the base constructor
        self.told = []
        self.weights = {}

    def sample(self, storage, batch_size):
        index = torch.randint(len(storage), (batch_size,))
        return index, {"half": index / 2}

    def add(self, index):
        self.told.append(("add", index))

    def extend(self, index):
        self.told.append(("extend", index.tolist()))

    def update_priority(self, index, priority):
        self.told.append(("priority", index.tolist(), torch.as_tensor(priority).tolist()))

    def mark_update(self, index, *, storage=None):
        self.told.append(("mark", index.tolist()))

    def _empty(self):
        self.told = ["empty"]

    def state_dict(self):
        return {"told": [*self.told]}

    def load_state_dict(self, state_dict):
        self.told = [*state_dict["told"]]

    def dumps(self, path):
        raise NotImplementedError

    def loads(self, path):
        raise NotImplementedError


class Walk(Sampler):
    """Walks through the storage. An epoch ends with the newest record."""

    def __init__(self):
        super().__init__()
        self.place = 0
        self._over = False

    @property
    def ran_out(self):
        return self._over

    @ran_out.setter
    def ran_out(self, value):
        self._over = value

    def sample(self, storage, batch_size):
        index = torch.arange(self.place, min(self.place + batch_size, len(storage)))
        self.place = int(index[-1] + 1) % len(storage)
        self._over = not self.place
        return index, {}

    def extend(self, index):
        pass


class Ring(Writer):
    """A ring with its own cursor."""

    def __init__(self):
        super().__init__()
        self._cursor = 0

    def add(self, data):
        index = self._cursor
        self._storage.set(index, data)
        self._cursor = (index + 1) % self._storage._max_size_along_dim0(single_data=data)
        return index

    def extend(self, data):
        size = self._storage._max_size_along_dim0(batched_data=data)
        index = (torch.arange(self._cursor, self._cursor + len(data)) % size)[-size:]
        self._storage[index] = data[-size:]
        self._cursor = int(index[-1] + 1) % size
        return index

    def _empty(self):
        self._cursor = 0

    def state_dict(self):
        return {"_cursor": self._cursor}

    def load_state_dict(self, state_dict):
        self._cursor = state_dict["_cursor"]

    def dumps(self, path):
        raise NotImplementedError

    def loads(self, path):
        raise NotImplementedError


class Shelf(Storage):
    """Keeps records in a dictionary, and reads by int, slice or list of ints."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.records = {}

    def set(self, cursor, data, *, set_cursor=True):
        if isinstance(cursor, int):
            self.records[cursor] = data
        else:
            for place, record in zip(cursor, data, strict=True):
                self.records[int(place)] = record

    def get(self, index):
        if isinstance(index, int):
            return self.records[index]
        places = range(len(self))[index] if isinstance(index, slice) else index
        return [self.records[int(place)] for place in places]

    def __len__(self):
        return len(self.records)

    def _empty(self):
        self.records = {}

    def state_dict(self):
        return {"records": dict(self.records)}

    def load_state_dict(self, state_dict):
        self.records = dict(state_dict["records"])

"""Damaged checkpoints: by accident, or by an attacker who can compute checksums.

Here a checkpoint is a dictionary of its files by name. A mutation changes some of them in place.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from gleanrl._checkpoint.manifest import BLOCK_BYTES

Files = dict[str, bytes]
Mutation = Callable[[random.Random, Files], None]
MANIFEST = "manifest.json"
HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        7,
        8,
        9,
        255,
        2**31,
        2**32,
        2**40,
        2**62,
        2**63 - 1,
        -(2**63),
        2**63,
        10**30,
    ),
    *(
        0.5,
        -0.0,
        1e308,
        1e-320,
        "",
        "x",
        "..",
        "../../etc/passwd",
        "/dev/zero",
        "/etc/passwd",
        "a\0b",
        "x" * 300,
    ),
    *(
        "next",
        "done",
        "$map",
        "cpu",
        "cuda:99",
        "meta",
        "float32",
        "object",
        "000000.bin",
        "os.system",
        "nan",
    ),
    *(
        [],
        {},
        [[]],
        [0],
        [2**40],
        [2**62, 2**62],
        [1] * 300,
        {"a": 1},
        {"$evil": 1},
        {"$float": "nan"},
        {"$map": []},
    ),
    *({"$map": [[[], 1]]}, {"$map": [[{"$float": "nan"}, 1], [{"$float": "nan"}, 1]]}, {"$tuple": [1, 2]}),
    *({"$size": [2**40]}, {"$size": [-1]}, {"$dtype": "float32"}, {"$dtype": "object"}, {"$device": "meta"}),
    *({"$device": "cuda:99"}, {"$device": "\0"}, {"$bytes": "AAAA"}, {"$bytes": "?"}, {"$float": "inf"}),
    {"$tensor": [[0, 0, 8]], "dtype": "int64", "shape": []},
    {"$tensor": [], "dtype": "float32", "shape": [0]},
    {"$tensor": [], "dtype": "float32", "shape": [0, 2**62]},
    {"$tensor": [[0, 0, 8]], "dtype": "uint8", "shape": [2**40]},
    {"$tensordict": {}, "batch_size": [2**40], "device": None, "names": None},
    {"$tensordict": {}, "batch_size": [], "device": "cuda:99", "names": None},
    {"$tensordict": {}, "batch_size": [1], "device": None, "names": [[]]},
    {"$file": [[0, 0, 64]], "name": "../x", "size": 64},
)


def deep(depth: int) -> Any:
    """Return lists nested to this depth."""
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def signed(text: str) -> bytes:
    """Return a manifest with a matching hash. In `text` the hash is still zeros."""
    data = text.encode()
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)


def body_of(files: Files) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(files[MANIFEST])
    body["sha256"] = "0" * 64
    return body


def text_of(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) pair in a tree of JSON."""
    found: list[tuple[Any, Any]] = []
    ahead = [tree]
    while ahead:
        part = ahead.pop()
        keys = list(part) if isinstance(part, dict) else range(len(part))
        found += [(part, key) for key in keys]
        ahead += [part[key] for key in keys if isinstance(part[key], (dict, list))]
    return found


def change_the_tree(draw: random.Random, files: Files) -> None:
    """Change the manifest within JSON's grammar, once or several times, and sign it."""
    body = body_of(files)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        found = [place for place in places(body) if place[1] != "sha256"]
        holder, key = draw.choice(found)
        old, kind = holder[key], draw.randrange(9)
        if kind <= 2:
            holder[key] = copy.deepcopy(draw.choice(HOSTILE))
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            other, other_key = draw.choice(found)
            holder[key] = copy.deepcopy(other[other_key])
        elif kind == 5 and type(old) is int:
            holder[key] = draw.choice((old + 1, old - 1, -old, old * 2, old + 2**32, float(old), str(old)))
        elif kind == 6 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        elif kind == 6 and isinstance(holder, dict):
            holder[draw.choice(("$map", "$evil", "", "x", "next", "$tensor"))] = holder.pop(key)
        elif kind == 7:
            holder[key] = draw.choice(
                ([old], {"a": old}, {"$tuple": [old]}, {"$map": [[1, old]]}, {"$tuple": old})
            )
        else:
            holder[key] = deep(draw.choice((30, 70, 200)))
    files[MANIFEST] = signed(text_of(body))


def change_the_text(draw: random.Random, files: Files) -> None:
    """Change the manifest's text against JSON's grammar, and sign it."""
    text, kind = text_of(body_of(files)), draw.randrange(7)
    numbers = [i for i, letter in enumerate(text) if letter.isdigit() and i > 80]
    at = draw.choice(numbers)
    if kind == 0:
        text = (
            text[:at]
            + draw.choice(("NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "0x1", "1_0"))
            + text[at + 1 :]
        )
    elif kind == 1:
        text = text[: draw.randrange(80, len(text))]
    elif kind == 2:
        text = text[:-1] + draw.choice((',"kind":"x"}', ',"state":null}', ',"format":1}', ',"files":[]}'))
    elif kind == 3:
        text = (
            text[:-1] + ',"x":' + draw.choice("[{").replace("{", '{"a":') * draw.choice((100, 5_000, 100_000))
        )
    elif kind == 4:
        begin = draw.randrange(80, len(text))
        text = text[:begin] + chr(draw.randrange(1, 0xD800)) + text[begin + 1 :]
    elif kind == 5:
        begin, end = sorted(draw.randrange(80, len(text)) for _ in range(2))
        text = text[:begin] + text[end:]
    else:
        begin, end = sorted(draw.randrange(80, len(text)) for _ in range(2))
        text = text[:end] + text[begin:]
    files[MANIFEST] = signed(text)


def change_the_data(draw: random.Random, files: Files) -> None:
    """Change bytes of a data file, and the manifest's entry for this file."""
    body = body_of(files)
    if not body["files"]:
        return change_the_tree(draw, files)
    number = draw.randrange(len(body["files"]))
    entry = body["files"][number]
    data = bytearray(files[entry["name"]])
    for _ in range(draw.choice((1, 1, 4, 64))):
        data[draw.randrange(len(data))] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    if draw.random() < 0.2:
        data = (
            data[: draw.randrange(len(data))] if draw.random() < 0.5 else data + bytes(draw.randrange(1, 200))
        )
    files[entry["name"]] = bytes(data)
    entry["size"] = len(data)
    extents = numbers_of(body, "extents", "<i8").reshape(-1, 3)
    checksums = numbers_of(body, "crc32", "<u4")
    at = 0
    for file, offset, size in extents.tolist():
        for begin in range(offset, offset + size, BLOCK_BYTES):
            if file == number:
                checksums[at] = zlib.crc32(data[begin : min(begin + BLOCK_BYTES, offset + size)])
            at += 1
    body["crc32"] = text_of_numbers(checksums)
    files[MANIFEST] = signed(text_of(body))


def change_the_extents(draw: random.Random, files: Files) -> None:
    """Change the position of an extent in the manifest, or its checksum."""
    body = body_of(files)
    name, dtype = draw.choice((("extents", "<i8"), ("extents", "<i8"), ("crc32", "<u4")))
    numbers = numbers_of(body, name, dtype)
    for _ in range(draw.choice((1, 1, 2))):
        if numbers.size:
            at, most = draw.randrange(numbers.size), int(np.iinfo(numbers.dtype).max)
            old, other = int(numbers[at]), int(numbers[draw.randrange(numbers.size)])
            new = draw.choice((old + 1, old - 1, -old, old * 2, other, draw.randrange(most), most, 0))
            numbers[at] = max(min(new, most), int(np.iinfo(numbers.dtype).min))
    if draw.random() < 0.2:
        numbers = numbers[: draw.randrange(numbers.size + 1)] if draw.random() < 0.5 else numbers.repeat(2)
    body[name] = text_of_numbers(numbers)
    files[MANIFEST] = signed(text_of(body))


def numbers_of(body: dict[str, Any], name: str, dtype: str) -> Any:
    """Return the numbers in a table of the manifest."""
    return np.frombuffer(base64.b64decode(body[name]), dtype).copy()


def text_of_numbers(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def flip_a_bit(draw: random.Random, files: Files) -> None:
    """Flip one bit of any file."""
    name = draw.choices(list(files), [len(data) for data in files.values()])[0]
    data = bytearray(files[name])
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    files[name] = bytes(data)


def damage(draw: random.Random, files: Files) -> None:
    """Change a file as a broken disk may do."""
    name, kind = draw.choice(list(files)), draw.randrange(6)
    data = files[name]
    begin, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    if kind == 0:
        files[name] = data[:begin]
    elif kind == 1:
        files[name] = data + draw.randbytes(draw.choice((1, 64, 4096)))
    elif kind == 2:
        files[name] = data[:begin] + bytes(end - begin) + data[end:]
    elif kind == 3:
        files[name] = data[:begin] + draw.randbytes(end - begin) + data[end:]
    elif kind == 4:
        del files[name]
    else:
        other = draw.choice(list(files))
        files[name], files[other] = files[other], data


def change_an_attribute(draw: random.Random, files: Files) -> None:
    """Replace, delete or add an attribute of an environment, and sign the manifest."""
    body = body_of(files)
    held = [holder["attributes"] for holder, key in places(body) if key == "attributes"]
    if not held:
        return change_the_tree(draw, files)
    attributes = draw.choice([each for each in held if each])
    name, others = draw.choice(list(attributes)), [value for each in held for value in each.values()]
    kind = draw.randrange(6)
    if kind == 0:
        del attributes[name]
    elif kind == 1:
        attributes[draw.choice(("step", "reset", "close", "__class__", "x", "env"))] = attributes[name]
    elif kind <= 3:
        attributes[name] = copy.deepcopy(draw.choice(others))
    else:
        attributes[name] = copy.deepcopy(draw.choice(HOSTILE))
    files[MANIFEST] = signed(text_of(body))


SIGNED: tuple[Mutation, ...] = (
    change_an_attribute,
    change_the_tree,
    change_the_tree,
    change_the_tree,
    change_the_text,
    change_the_data,
    change_the_extents,
)
"""Mutations with a valid hash, after which a checkpoint may load with other content."""
UNSIGNED: tuple[Mutation, ...] = (flip_a_bit, damage)
"""Mutations after which a checkpoint is detected as damaged, unless it is unchanged."""

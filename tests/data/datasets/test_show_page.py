"""The page of `show` works in a real browser: it shows the records, escapes all texts, and loads nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from gleanrl.data.datasets.show import show
from tests.browser import CHROMIUM, Browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
EVIL = "</script><img src=x onerror='window.hit = 1'><!--data-->\u2028\u2029&lt;\"'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def steps(lengths: list[int], **more: Any) -> TensorDict:
    """Return episodes of given lengths. Rewards are 0, 1, 2, ...; every second episode is truncated."""
    count = sum(lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ended = torch.zeros(count, 1, dtype=torch.bool)
    ended[torch.tensor(lengths).cumsum(0) - 1] = True
    cut = ended & (ids % 2 == 1)[:, None]
    observed = torch.arange(count).float() + ids
    flags = {"terminated": ended & ~cut, "truncated": cut, "done": ended}
    following = {"observation": observed + 1, "reward": torch.arange(count).float()[:, None], **flags}
    given = {"observation": observed, "collector": {"traj_ids": ids}, "next": following}
    return TensorDict({**given, **more}, [count])


def page(folder: Path, data: Any, buffer: Any = None, **options: Any) -> Path:
    """Return the page of a checkpoint with the data."""
    if buffer is None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(max(len(data), 1), **options))
    if len(data):
        buffer.extend(data)
    buffer.dumps(folder / "saved")
    show(folder / "saved", html=folder / "page.html")
    return folder / "page.html"


def data_of(made: Path) -> Any:
    text = made.read_text()
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


def table(browser: Browser, part: str) -> list[list[str]]:
    """Return the texts of the rows of the last table in a part of the page."""
    rows = f"[...document.querySelectorAll('{part} tbody')].at(-1).rows"
    found: list[list[str]] = browser.run(
        f"[...{rows}].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


def test_page_has_the_values_of_all_steps(tmp_path: Path):
    found = data_of(page(tmp_path, steps([3, 1, 2])))
    assert found["episodes"]["length"] == [3, 1, 2] and found["episodes"]["return"] == [3, 3, 9]
    assert found["episodes"]["truncated"] == [0, 1, 0] and found["episodes"]["id"] == [0, 1, 2]
    keys = [key["name"] for key in found["steps"]["keys"]]
    last = found["steps"]["episodes"][2]
    assert last["slots"] == [4, 5] and last["values"][keys.index("next.reward")] == [[4, 5]]
    assert last["values"][keys.index("observation")] == [[6, 7]]
    assert "next.observation" not in keys  # repeats the observation of the following step


def test_numbers_that_are_not_finite_are_words(tmp_path: Path):
    data = steps([5])
    rewards = [[torch.nan], [torch.inf], [-torch.inf], [1e300], [1e-310]]
    data["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    found = data_of(page(tmp_path, data))
    values = found["steps"]["episodes"][0]["values"][0][0]
    assert values == ["NaN", "Infinity", "-Infinity", pytest.approx(1e300), pytest.approx(1e-310)]
    assert found["episodes"]["return"] == ["NaN"] and found["statistics"][1][-1] == "1"


def test_slots_of_several_streams_in_a_full_ring_are_in_the_order_of_time(tmp_path: Path):
    t = torch.arange(5.0)[:, None].expand(5, 2)
    ended = (t == 2) | (t == 4)
    data = TensorDict({"x": t * 10 + torch.arange(2), "next": {"reward": t, "done": ended}}, [5, 2])
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), dim_extend=0)
    found = data_of(page(tmp_path, data, buffer))
    keys = [key["name"] for key in found["steps"]["keys"]]
    values = [one["values"][keys.index("x")][0] for one in found["steps"]["episodes"]]
    assert values == [[10, 20], [30, 40], [11, 21], [31, 41]]


def test_a_large_buffer_is_sampled_evenly(tmp_path: Path):
    lengths = [1] * 30_000 + [100_000, 300_000]
    count = sum(lengths)
    noise = torch.rand(count, 4)
    made = page(tmp_path, steps(lengths, noise=noise))
    found = data_of(made)
    numbers, opened = found["episodes"]["number"], found["steps"]["episodes"]
    assert len(numbers) == 20_000 and numbers[-1] == 30_001 and found["count"] == 30_002
    assert max(b - a for a, b in zip(numbers, numbers[1:], strict=False)) == 2
    assert len(opened) == 200 and opened[-1]["t"][0] == 0 and opened[-1]["t"][-1] == 299_999
    assert made.stat().st_size < 5e6


def test_noisy_frames_keep_the_limit(tmp_path: Path):
    pixels = torch.randint(0, 256, (3000, 64, 64, 3), dtype=torch.uint8)
    made = page(tmp_path, steps([100] * 30, pixels=pixels))
    (camera,) = data_of(made)["frames"]
    assert len(camera["episodes"]) > 20 and made.stat().st_size < 20e6


@in_browser
@pytest.mark.parametrize("kind", ["empty", "one row", "no flags", "streams", "objects", "tensor", "groups"])
def test_unusual_records_open_without_an_error(tmp_path: Path, browser: Browser, kind: str):
    if kind == "streams":
        ended = torch.tensor([[0, 0], [1, 0], [0, 1], [0, 0], [1, 0]]).bool()
        data: Any = TensorDict(
            {"x": torch.zeros(5, 2), "next": {"reward": torch.ones(5, 2), "done": ended}}, [5, 2]
        )
        made = page(tmp_path, data, ndim=2)
    elif kind == "groups":
        data = steps([2, 2], agents=TensorDict({"observation": torch.ones(4, 3, 2)}, [4]))
        data["next", "agents"] = TensorDict({"reward": torch.ones(4, 3, 1)}, [4])
        made = page(tmp_path, data)
    else:
        sizes = {"objects": [3], "one row": [1]}
        data = steps(sizes.get(kind, [2]))
        if kind == "objects":
            data["text"] = NonTensorStack("a", "b", "c")
        if kind == "no flags":
            data = TensorDict(
                {"observation": torch.arange(4), "complex": torch.ones(4, dtype=torch.complex64)}, [4]
            )
        made = page(tmp_path, torch.arange(4.0) if kind == "tensor" else [] if kind == "empty" else data)
    browser.errors.clear()
    browser.look(1280)
    browser.open(made)
    assert browser.run("document.body.dataset.ready") == "yes" and browser.errors == []
    heading = browser.run("document.querySelector('#episode h2').textContent")
    assert heading == ("No episode" if kind == "empty" else "Episode 0")


@in_browser
def test_texts_of_the_data_are_never_markup(tmp_path: Path, browser: Browser):
    data = steps([2, 1], text=NonTensorStack(EVIL, "b", "c"))
    data[EVIL] = torch.ones(3)
    (tmp_path / "<b>").mkdir()
    made = page(tmp_path / "<b>", data)
    browser.errors.clear()
    browser.requests.clear()
    browser.look(1280)
    browser.open(made)
    assert browser.run("[window.hit, document.querySelectorAll('b b, img').length]") == [None, 0]
    assert browser.run("document.querySelector('h1').textContent").endswith("<b>/saved")
    cells = dict(table(browser, "#episode"))
    assert cells["text"] == EVIL and cells[EVIL] == "1"
    assert EVIL in [row[0] for row in table(browser, "#columns")]
    assert browser.errors == [] and browser.requests == [made.as_uri()]


@in_browser
def test_the_page_runs_no_script_that_is_added_to_it(tmp_path: Path, browser: Browser):
    made = page(tmp_path, steps([2]))
    made.write_text(made.read_text().replace("</main>", "</main><script>window.hit = 1</script>"))
    browser.look(1280)
    browser.open(made)
    assert browser.run("window.hit ?? 0") == 0 and browser.run("document.body.dataset.ready") == "yes"


@in_browser
def test_list_is_sorted_and_filtered_by_the_keyboard(tmp_path: Path, browser: Browser):
    lengths = [1 + k % 7 for k in range(60)]
    browser.look(1280)
    browser.open(page(tmp_path, steps(lengths)))
    assert [row[0] for row in table(browser, "#episodes")] == [str(k) for k in range(25)]
    browser.run("document.getElementById('filter').focus()")
    browser.press(*"length >= 6, !truncated")
    assert {row[1] for row in table(browser, "#episodes")} == {"6", "7"}
    expected = [k for k, length in enumerate(lengths) if length >= 6 and k % 2 == 0]
    assert [int(row[0]) for row in table(browser, "#episodes")] == expected
    browser.press("Tab", "Tab", "Tab", "Enter", "Enter")  # the table, its first header, and the length
    assert browser.run("document.querySelector('[data-name=length]').ariaSort") == "descending"
    found = [row[1] for row in table(browser, "#episodes")]
    assert found == sorted(found, reverse=True) and len({*found}) == 2
    browser.run("document.getElementById('filter').focus()")
    browser.press(*", colour")
    assert "“colour” is no comparison" in browser.run("document.querySelector('[role=status]').textContent")
    assert browser.run("document.getElementById('filter').ariaInvalid") == "true"


@in_browser
def test_slider_shows_frame_and_values_of_each_step(tmp_path: Path, browser: Browser):
    pixels = torch.randint(0, 256, (4, 10, 12, 3), dtype=torch.uint8)
    browser.look(1280)
    browser.open(page(tmp_path, steps([1, 3], pixels=pixels)), "#e1")
    browser.run("document.getElementById('step').focus()")
    for step in range(3):
        assert dict(table(browser, "#episode"))["next.reward"] == str(step + 1)
        assert (
            browser.run("document.querySelector('output').textContent") == f"step {step} of 3, row {step + 1}"
        )
        assert browser.run(PIXELS) == pixels[step + 1].flatten().tolist()
        browser.press("ArrowRight")


LAYOUTS = ("CHW", "HW", "HW1", "stack", "stack of CHW", "last is stack", "RGBA", "float", "large")
SIZE = "(({naturalWidth: w, naturalHeight: h}) => [w, h])(document.querySelector('#episode img'))"
PIXELS = """(async () => {
  const image = document.querySelector('#episode img'), canvas = document.createElement('canvas');
  await image.decode();
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  return [...context.getImageData(0, 0, canvas.width, canvas.height).data].filter((_, k) => k % 4 < 3);
})()"""


@in_browser
@pytest.mark.parametrize("kind", LAYOUTS)
def test_pictures_of_each_layout_have_the_right_pixels(tmp_path: Path, browser: Browser, kind: str):
    picture = torch.randint(0, 256, (16, 20, 3), dtype=torch.uint8)
    gray = picture[..., 0]
    older, opaque = torch.zeros_like(gray), torch.full((16, 20, 1), 255, dtype=torch.uint8)
    given, expected = {
        "CHW": (picture.movedim(2, 0), picture),
        "HW": (gray, gray),
        "HW1": (gray[..., None], gray),
        "stack": (torch.stack([older, older, older, gray]), gray),
        "stack of CHW": (torch.stack([torch.zeros_like(picture), picture]).movedim(3, 1), picture),
        "last is stack": (torch.stack([older, older, older, gray], -1), gray),
        "RGBA": (torch.cat([picture, opaque], -1), picture),
        "float": (torch.cat([picture, picture]).movedim(2, 0) / 255, torch.cat([picture, picture])),
        "large": (picture.repeat_interleave(30, 0).repeat_interleave(30, 1), None),
    }[kind]
    browser.look(1280)
    browser.open(page(tmp_path, steps([1], pixels=given[None])))
    found = torch.tensor(browser.run(PIXELS))
    if expected is None:
        assert browser.run(SIZE) == [150, 120] and {*found.tolist()} <= {*picture.flatten().tolist()}
        return
    expected = expected if expected.ndim == 3 else expected[..., None].expand(-1, -1, 3)
    assert (found.view(expected.shape) - expected.int()).abs().max() <= (kind == "float")


@in_browser
def test_links_lead_to_the_rows_of_problems_and_of_the_largest_priorities(tmp_path: Path, browser: Browser):
    data = steps([3, 4, 2])
    data["observation"][5] = 99.0
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(9))
    buffer.extend(data)
    buffer.update_priority(torch.arange(9), torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 50]))
    browser.look(390)
    browser.open(page(tmp_path, [], buffer))
    browser.run("document.querySelector('#problems .problem a').click()")
    place = "document.querySelector('#episode h2').textContent + ': ' + document.querySelector('output').textContent"
    browser.run("new Promise(requestAnimationFrame)")
    assert browser.run(place) == "Episode 1: step 1 of 4, row 4"
    assert table(browser, "#priorities")[0] == ["8", "50", "episode 2, step 1"]
    browser.run("document.querySelector('#priorities a').click()")
    browser.run("new Promise(requestAnimationFrame)")
    assert browser.run(place) == "Episode 2: step 1 of 2, row 8"
    assert dict(table(browser, "#episode"))["priority"] == "50"
    assert browser.run("document.querySelector('#episode').getBoundingClientRect().top") < 100


@in_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_the_window_in_light_and_dark(tmp_path: Path, browser: Browser, width: int, dark: bool):
    browser.look(width, dark=dark)
    browser.open(page(tmp_path, steps([5] * 30)))
    assert browser.run("document.documentElement.scrollWidth") == width
    red, green, blue = map(
        int, re.findall(r"\d+", browser.run("getComputedStyle(document.body).backgroundColor"))
    )
    assert (red + green + blue < 200) == dark
    charts = "[...document.querySelectorAll('.uplot')]"
    outside = f"{charts}.filter(chart => chart.offsetWidth > chart.parentNode.offsetWidth + 1).length"
    assert browser.run(outside) == 0 and browser.run(f"{charts}.length") >= 4
    tops = "['episode', 'episodes'].map(id => document.getElementById(id).getBoundingClientRect().top)"
    top, top_of_list = browser.run(tops)
    assert (top == top_of_list) == (width == 1280)


HAS_COLOUR = """(() => {
  const colour = getComputedStyle(document.documentElement).getPropertyValue('--c0').trim();
  const wanted = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  const canvas = document.querySelector('#distributions canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  for (let at = 0; at < data.length; at += 4) if (wanted.every((part, k) => data[at + k] === part)) return colour;
})()"""


@in_browser
def test_charts_follow_a_change_of_colours_and_width(tmp_path: Path, browser: Browser):
    browser.look(1280)
    browser.open(page(tmp_path, steps([5] * 3)))
    wide, light = browser.run("document.querySelector('.uplot').offsetWidth"), browser.run(HAS_COLOUR)
    browser.look(390, dark=True)
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.run("document.querySelector('.uplot').offsetWidth") < 390 < wide
    assert None is not browser.run(HAS_COLOUR) != light is not None

"""The report of a run: numbers worked out by hand, and the page in a real browser."""

import json
import math
import os
import re

import pytest
import torch

from megatron_support.__main__ import main
from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.files import write_rollouts
from megatron_support.training.report.histogram import histogram
from megatron_support.training.report.page import render
from megatron_support.training.report.run_files import read_run
from megatron_support.training.report.run_page import run_data
from megatron_support.training.token_record import record_tokens
from tests.browser import load, needs_chromium
from tests.unit.test_token_record import batch

RECIPE = """\
name: tiny
loss: {surrogate: {type: ppo_clip, clip_low: 0.2, clip_high: 0.3}, ratio_level: token}
advantages: {type: grpo}
train: {steps: 4}
"""


@pytest.fixture
def run_folder(tmp_path):
    """A finished run of four steps with the batch of the token record's tests."""
    folder = tmp_path / "tiny-1"
    folder.mkdir()
    metrics = [
        {
            "step": step,
            "reward": 0.1 * step,
            "loss": -0.01 * step,
            "kl_penalty": 0.001 * step,
            "approx_entropy": 2.0,
            "clip_fraction_low": 0.01,
            "clip_fraction_high": 0.02,
            "policy_support_excluded_tokens": 3.0,
            "valid_tokens": 5.0,
            "token_mult_prob_error": 1.02,
            "seconds": 2.0,
            "tokens_per_second": 4.0,
            "seconds/update": 1.5,
            "grad_norm": "nan" if step == 2 else 0.5,
        }
        for step in (1, 2, 3, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    records = [record_tokens(step, batch()) for step in (1, 2, 3, 4)]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    (folder / "recipe.yaml").write_text(RECIPE)
    worst = {"step": 1, "sample_id": "a", "position": 2, "token": 2, "source": "previous"}
    worst |= {"generation_logprob": -math.log(2), "trainer_logprob": -math.log(4)}
    (folder / "summary.json").write_text(json.dumps({"excluded_tokens": {"least_likely": [worst]}}))
    environment = {"ranks": 2, "layout": {"tensor": 2, "data": 1}, "processor": "a CPU", "started": "today"}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "token_text.json").write_text(json.dumps({"1": "</script><b>", "2": " two", "9": "\n"}))
    write_rollouts(folder / "rollouts_last_step.jsonl", batch(sample_ids=("a", "b &\"<'")))
    return folder


def test_excluded_tokens_add_up_over_steps(run_folder):
    data = run_data(read_run(run_folder))
    excluded = data["excluded"]
    assert excluded["steps"][0] == {"step": 1, "counts": [1, 1, 1]}
    # signs are positive, zero, negative
    assert excluded["sources"] == [
        {"source": "previous", "counts": [4, 0, 0]},
        {"source": "generation", "counts": [0, 0, 4]},
        {"source": "current", "counts": [4, 0, 0]},
    ]
    shares = [(bin["label"], bin["excluded"], bin["total"], bin["share"]) for bin in excluded["positions"]]
    assert shares == [("0", 4, 8, 0.5), ("1", 8, 8, 1.0), ("2", 0, 4, 0.0)]
    assert excluded["tokens"] == [{"id": 2, "count": 8}, {"id": 1, "count": 4}]
    assert excluded["worst"][0]["engine"] == pytest.approx(0.5) and excluded["worst"][0]["trainer"] == pytest.approx(
        0.25
    )


def test_tiles_window_and_scatter(run_folder):
    data = run_data(read_run(run_folder))
    values = [tile["value"] for tile in data["tiles"]]
    assert values == ["0.100 → 0.400", "60.000%", "1.0200", "4 tokens/s"]
    assert data["ratio"]["window"] == pytest.approx([0.8, 1.3])
    assert data["ratio"]["histogram"]["counts"][0] == 1 and sum(data["ratio"]["histogram"]["counts"]) == 2
    # engine and trainer of the five response tokens, those without an engine value left out
    assert [point[:2] for point in data["scatter"]["points"]] == [[-1, -1], [-1, -1], [-1, -1]]
    assert [point[5] for point in data["scatter"]["points"]].count("current") == 1


def test_samples_carry_their_tokens_and_the_worst_comes_first(run_folder):
    first, second = run_data(read_run(run_folder))["samples"]
    assert (first["id"], first["excluded"], first["ratios"]) == ("a", 2, "2 to 2")
    assert first["source"] == [None, "current", "previous", None]
    assert first["prev"][2] == "out" and first["gen"][1] == -1
    assert second["spread"] == pytest.approx(math.log(4), rel=1e-6)


def test_a_run_that_is_still_going_has_a_page(run_folder):
    for name in ("summary.json", "rollouts_last_step.jsonl", "token_text.json", "environment.json"):
        (run_folder / name).unlink()
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # being written
    data = run_data(read_run(run_folder))
    assert data["steps"] == [1, 2, 3, 4] and data["samples"] == [] and data["excluded"]["worst"] == []


def test_the_newest_run_of_a_folder_is_taken(run_folder):
    assert read_run(run_folder.parent).path == run_folder


def test_what_is_no_run_folder_is_refused(tmp_path, run_folder):
    with pytest.raises(ConfigurationError, match=r"nothing: not a run folder, it has no metrics\.jsonl; give"):
        read_run(tmp_path / "nothing")
    (run_folder / "tokens.jsonl").write_text("{\n")
    with pytest.raises(ConfigurationError, match=r"tokens\.jsonl:1: damaged"):
        read_run(run_folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("recipe.yaml", "[1, 2]"),
        ("recipe.yaml", "loss: [1]"),
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"step": 1}\n'),
        ("metrics.jsonl", '{"step": 1, "reward": null}\n'),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("tokens.jsonl", '{"step": 1}\n'),
        ("summary.json", "{}"),
        ("summary.json", '"x"'),
        ("environment.json", "[1]"),
        ("token_text.json", "[1]"),
    ],
)
def test_a_file_of_another_shape_is_a_message(run_folder, capsys, name, content):
    (run_folder / name).write_text(content)
    code = main(["report", str(run_folder)])
    assert code == 2 and "error: " + str(run_folder) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["recipe.yaml", "tokens.jsonl", "summary.json"])
def test_a_pipe_in_a_run_folder_does_not_block(run_folder, name):
    (run_folder / name).unlink(missing_ok=True)
    os.mkfifo(run_folder / name)
    with pytest.raises(ConfigurationError, match=f"{name}: must be a regular file"):
        read_run(run_folder)


def test_a_page_needs_nothing_else(run_folder, tmp_path):
    assert main(["report", str(run_folder), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    links = set(re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"'\s)>]+)", page))
    assert not [link for link in links if not link.startswith(("#", "data:", "${"))], links
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert page.count("</script>") == 2, "data cannot end its element"


def test_a_page_that_cannot_be_written_is_a_message(run_folder, capsys):
    assert main(["report", str(run_folder), "--out", "/nowhere/page.html"]) == 2
    assert "--out must be a file that can be written" in capsys.readouterr().err


def test_numbers_that_are_not_finite_become_null():
    page = render("run", {"title": "t", "values": [math.nan, {"x": math.inf}], "whole": 1})
    assert '{"title":"t","values":[null,{"x":null}],"whole":1}' in page


def test_histograms():
    assert histogram(torch.tensor([1, 2, 2, 5])) == {
        "edges": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
        "counts": [1, 2, 0, 0, 1],
    }
    assert histogram(torch.tensor([0.0, 0.25, 1.0]), bins=4) == {
        "edges": [0.0, 0.25, 0.5, 0.75, 1.0],
        "counts": [1, 1, 0, 1],
    }
    one_value = histogram(torch.tensor([2.0, 2.0]), bins=4)
    assert one_value["counts"] == [0, 0, 2, 0, 0]
    assert one_value["edges"][2] < 2 < one_value["edges"][3]
    assert histogram(torch.tensor([])) is None
    far = torch.cat([torch.linspace(0, 1, 998), torch.tensor([-50.0, 90.0])])
    cut = histogram(far, bins=10, cut=0.01)
    assert cut["edges"][0] >= 0 and cut["edges"][-1] <= 1 and sum(cut["counts"]) == 1000


@needs_chromium
class TestInABrowser:
    @pytest.fixture
    def page(self, run_folder, tmp_path):
        main(["report", str(run_folder), "--out", str(tmp_path / "page.html")])
        return tmp_path / "page.html"

    def test_it_loads_without_errors_and_every_plot_is_drawn(self, page, tmp_path):
        loaded = load(page, tmp_path / "profile")
        assert loaded.console == [] and 'data-ready="true"' in loaded.dom
        charts = loaded.charts()
        drawn = {name for name, markup in charts.items() if "<svg" in markup}
        lines = {"reward", "loss", "kl", "entropy", "clip", "grad_norm", "seconds", "speed", "mismatch", "ratio-steps"}
        bars = {"ratio-last", "excluded-steps", "excluded-source", "excluded-position", "excluded-token"}
        assert lines | bars | {"scatter"} <= drawn
        for name in lines:
            assert 'class="line"' in charts[name] and "NaN" not in charts[name], name
        assert charts["scatter"].count("<circle") == 3
        assert charts["excluded-position"].count('class="bar"') == 3
        assert "“ two”" in charts["excluded-token"] and "0.25" in charts["excluded-worst"]
        assert "ppo_clip" in charts["recipe"] and "a CPU" in charts["environment"]

    def test_an_address_opens_a_sample(self, page, tmp_path):
        loaded = load(page, tmp_path / "profile", suffix="#sample=" + "b%20%26%22%3C'")
        opened = loaded.dom.split('id="opened-sample"')[1].split("</article>")[0]
        assert "b &amp;\"&lt;'" in opened and loaded.console == []
        assert opened.count("token prompt") == 2 and opened.count("token out") == 1 + 3, "one, and three in the key"
        assert "color-mix" in opened, "the token whose ratio is a quarter is coloured"

    def test_a_click_opens_a_sample(self, page, tmp_path):
        """A script at the end of the page clicks the second sample, as a person would."""
        click = "<script>document.querySelectorAll('.item')[1].click()</script></body>"
        page.write_text(page.read_text().replace("</body>", click))
        loaded = load(page, tmp_path / "profile")
        opened = loaded.dom.split('id="opened-sample"')[1].split("</article>")[0]
        assert "sample b &amp;" in opened and loaded.console == []

    def test_the_console_of_a_broken_page_is_seen(self, page, tmp_path):
        page.write_text(page.read_text().replace("startTheme();", "startTheme(); missing();", 1))
        assert load(page, tmp_path / "profile").console, "otherwise the tests above prove nothing"

    def test_a_run_without_samples_loads(self, run_folder, page, tmp_path):
        for name in ("summary.json", "rollouts_last_step.jsonl", "tokens.jsonl", "environment.json"):
            (run_folder / name).unlink()
        main(["report", str(run_folder), "--out", str(page)])
        loaded = load(page, tmp_path / "profile", width=500)
        assert loaded.console == [] and 'data-ready="true"' in loaded.dom

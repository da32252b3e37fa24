"""The README's figures, docs/results.md and the charts are what results/ gives; links of all pages work."""

import pathlib
import re
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = {"README.md": 120, "docs/architecture.md": 250}


@pytest.fixture
def results_pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield __import__("results_pages")
    sys.modules.pop("results_pages")


def entry(workload: str, layout: str, milliseconds: dict[str, float], **more: Any) -> dict[str, Any]:
    return {
        "group": "block",
        "workload": workload,
        "dtype": "fp32",
        "layout": layout,
        "precision": "tf32",
        "numerics": "pytorch",
        "batch": 0,
        "cudnn_benchmark": False,
        "shape": [8, 3, 4, 4],
        "seconds": {name: {"median": value / 1e3} for name, value in milliseconds.items()},
    } | more


def test_pages_are_what_the_results_give(results_pages: Any) -> None:
    stale = [str(path) for path, text in results_pages.pages().items() if path.read_text() != text]
    assert not stale, f"run scripts/record.py pages: {stale} differ from results/"


def test_the_best_pytorch_is_the_fastest_way_in_either_memory_format(results_pages: Any) -> None:
    entries = [
        entry("net", "contiguous", {"onepass": 1, "eager": 8, "compile": 6}),
        entry("net", "contiguous", {"onepass": 1, "eager": 7}, cudnn_benchmark=True),
        entry("net", "channels_last", {"onepass": 0.5, "eager": 9, "compile": 4}),
        entry("net", "contiguous", {"onepass": 2, "eager": 3}, precision="ieee"),
        entry("net", "contiguous", {"onepass": 0.1, "eager": 0.2}, batch=1),
        entry("net", "contiguous", {"onepass": 0.1, "eager": 0.2}, numerics="fast"),
        entry("net", "contiguous", {}, seconds={}),
    ]
    found = results_pages.comparisons(entries, "block", "fp32")["net"]
    assert (found["eager"], found["best"], found["onepass"]) == pytest.approx((8e-3, 4e-3, 1e-3))


def test_bars_are_shares_of_eager(results_pages: Any) -> None:
    entries = [entry("net", "contiguous", {"onepass": 50, "eager": 200, "compile": 100})]
    benchmarks = {"entries": entries, "torch": "2.11.0+cu130", "date": "2026-01-01"}
    result = {"device": {"name": "GPU"}, "benchmarks": benchmarks}
    chart = results_pages.chart(result, results_pages.THEMES["speed.svg"])
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([0-9.]+)"', chart)]
    assert widths == pytest.approx([results_pages.FULL, results_pages.FULL / 2, results_pages.FULL / 4])
    assert "50.0 ms: 4.0 times as fast as eager, 2.0 times as the best PyTorch" in chart


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"", text)
    targets = [link for pair in links for link in pair if link and "://" not in link]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("name", LONGEST)
def test_pages_for_newcomers_stay_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST[name]


def test_networks_are_compared_by_their_best_ways(results_pages: Any) -> None:
    import network_pages

    def way(*ms: float) -> dict[str, Any]:
        return {"ms": ms, "peak_bytes": 2**20, "chains": {"kept": 3, "found": 4}}

    ways = {"eager": way(9, 8, 10), "compile": way(6, 5, 7), "onepass, graphs": way(3, 2, 4)}
    row = {"ways": ways, "best": "onepass, graphs", "best_of_compile": "compile", "speedup": 2.0}
    row |= {"right": True, "cudnn_benchmark": True, "hash": "1"}
    models = {"date": "2026-01-01", "rows": {"net fp32 forward": row, "lost": {"ways": {}}}}
    models["device_code_hash"] = "2"
    result = {"models": models, "benchmarks": {"device_code_hash": "2"}}

    def section() -> str:
        return "\n".join(network_pages.section(result, results_pages.table))

    text = section()
    cells = "9.00 (8.00 to 10.00) | 6.00 (5.00 to 7.00) | 3.00 (2.00 to 4.00), graphs | 2.00 | 3 of 4 | 1 / 1"
    assert cells in text and "lost" not in text and "with cudnn.benchmark;" in text
    assert "builds" not in text and "changed" not in text
    assert "mean 2.00, worst 2.00" in network_pages.sentences(models)[0]
    ways["eager"] = {"failed": "out of memory"}
    assert "| failed | 6.00" in section()
    row["cudnn_benchmark"] = False
    assert not network_pages.sentences(models)
    assert "not the fastest" in section()
    models["rows"]["other fp32 forward"] = row | {"hash": "3"}
    result["benchmarks"]["device_code_hash"] = "4"
    assert "2 builds of the library. The device code has changed since." in section()

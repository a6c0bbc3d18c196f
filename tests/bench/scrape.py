"""`make bench NAME=scrape`: how fast a long log is scraped and its report built, and the memory of scraping.

For comparison it measures the least work on a log: a regular expression is matched against each line.
"""

from __future__ import annotations

import io
import multiprocessing
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from parakit.logs.scrape import scrape_log

_LINE = (
    " [2025-09-07 {hour:02d}:{minute:02d}:{second:02d}.{micro:06d}] iteration {i:8d}/{n:8d} |"
    " consumed samples: {samples:12d} | elapsed time per iteration (ms): {elapsed:.1f} |"
    " throughput per GPU (TFLOP/s/GPU): {rate:.1f} | learning rate: {lr:.6E} |"
    " global batch size:    64 | lm loss: {loss:.6E} | loss scale: 131072.0 |"
    " grad norm: {norm:.3f} | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)
_ROUNDS = 5
_PLAIN = re.compile(r"iteration +(\d+)/.* lm loss: (\S+)")


@dataclass(frozen=True)
class BenchResult:
    """One measurement."""

    iterations: int
    log_bytes: int
    seconds: float
    """Processor seconds of scraping; the following fields are processor seconds too."""
    plain_seconds: float
    """Seconds for reading lines and matching a regular expression only."""
    counted_seconds: float
    """Seconds of `grep -c`."""
    peak_memory_mib: float
    build_seconds: float
    """Seconds for the full report, which scrapes the log again. Libraries are imported before."""

    def __str__(self) -> str:
        rate = self.iterations / self.seconds
        return (
            f"{self.iterations:,} iterations, {self.log_bytes / 1e6:.0f} MB: {self.seconds:.2f} s"
            f" of processor time ({rate:,.0f} iterations/s,"
            f" {self.log_bytes / 1e6 / self.seconds:.0f} MB/s),"
            f" {self.seconds / self.plain_seconds:.2f} times what one regular expression over each line"
            f" takes, {self.seconds / max(self.counted_seconds, 1e-3):.0f} times what grep -c takes,"
            f" peak memory {self.peak_memory_mib:.0f} MiB; its report takes"
            f" {self.build_seconds / self.seconds:.2f} times as long"
        )


def bench_scrape(iterations: int = 500_000) -> BenchResult:
    """Write a log of that many iterations, scrape it, and return the measurement."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "long.log"
        with log.open("w") as file:
            file.writelines(synthetic_lines(iterations))
        start = time.process_time()
        scraped = scrape_log(log)
        seconds = time.process_time() - start
        peak_mib = _peak_memory_mib()
        start = time.process_time()
        with log.open() as lines:
            plain = sum(_PLAIN.search(line) is not None for line in lines)
        plain_seconds = time.process_time() - start
        assert len(scraped.iterations) == plain == iterations
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        # If nobody reads the count, grep stops at the first line.
        subprocess.run(("grep", "-c", "lm loss", str(log)), check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        counted = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        size = log.stat().st_size
        built = _build_seconds(log)
        return BenchResult(iterations, size, seconds, plain_seconds, counted, peak_mib, built)


def _build_seconds(log: Path) -> float:
    # Imported here, so that its memory is not the scraper's; matplotlib alone takes half a second.
    import jinja2  # noqa: F401
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401

    from parakit.reporting.build import BuildOptions, build

    options = BuildOptions("bench", (log,), reports_root=log.parent)
    start = time.process_time()
    build(options, Console(file=io.StringIO()))
    return time.process_time() - start


def _peak_memory_mib() -> float:
    """Return VmHWM. Linux starts ru_maxrss at the peak of the parent process, so it cannot be used."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None, status
    return int(match[1]) / 1024


def synthetic_lines(iterations: int) -> Iterator[str]:
    """Yield distinct iteration lines as Megatron 0.16 prints them."""
    for i in range(1, iterations + 1):
        yield _LINE.format(
            hour=i // 3600 % 24,
            minute=i // 60 % 60,
            second=i % 60,
            micro=i % 1_000_000,
            i=i,
            n=iterations,
            samples=64 * i,
            elapsed=540 + i % 97 / 10,
            rate=290 + i % 89 / 10,
            lr=6e-5 * (1 - i / iterations / 2),
            loss=11 / (1 + i / iterations),
            norm=1 + i % 83 / 100,
        )


def main() -> None:
    """Print measurements, each from its own process, and the medians of their ratios."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        results = [pool.apply(bench_scrape) for _ in range(_ROUNDS)]
    print(*results, sep="\n")
    for quantity, ratios in {
        "scraping, in terms of grep -c": [
            result.seconds / result.counted_seconds for result in results
        ],
        "a report, in terms of scraping": [
            result.build_seconds / result.seconds for result in results
        ],
    }.items():
        print(f"{quantity}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

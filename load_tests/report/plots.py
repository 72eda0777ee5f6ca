"""Every plot of a load test for which the result has data, the main one first."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from ropewalk.load_tests.common.types import Result
from ropewalk.load_tests.report.goodput_plots import goodput_plots
from ropewalk.load_tests.report.latency_plots import context_plots, load_plots, setting_plots
from ropewalk.load_tests.report.plot import Subject, subject
from ropewalk.load_tests.report.run_plots import client_plots, order_plots
from ropewalk.load_tests.report.server_plots import cache_plots, shift_plots
from ropewalk.report.page import Section

_MAKERS: tuple[Callable[[Subject], Iterator[Section]], ...] = (
    context_plots,
    setting_plots,
    load_plots,
    goodput_plots,
    shift_plots,
    cache_plots,
    client_plots,
    order_plots,
)


def plots(result: Result) -> list[Section]:
    """Empty if nothing was measured. Keys are made safe for links and command lines."""
    measured = subject(result)
    found = [plot for make in _MAKERS for plot in make(measured) if plot.pictures]
    return [replace(plot, key=re.sub(r"[^\w:.-]+", "-", plot.key)) for plot in found]

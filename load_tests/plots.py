"""Every plot of a load test for which the result has data, the main one first."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from load_tests.goodput_plots import goodput_plots
from load_tests.latency_plots import context_plots, load_plots, setting_plots
from load_tests.plot import Plot, Subject, subject
from load_tests.run_plots import client_plots, order_plots
from load_tests.server_plots import cache_plots, shift_plots
from load_tests.terms import Result

_MAKERS: tuple[Callable[[Subject], Iterator[Plot]], ...] = (
    context_plots,
    setting_plots,
    load_plots,
    goodput_plots,
    shift_plots,
    cache_plots,
    client_plots,
    order_plots,
)


def plots(result: Result) -> list[Plot]:
    """Empty if nothing was measured. Keys are made safe for links and command lines."""
    measured = subject(result)
    found = [plot for make in _MAKERS for plot in make(measured) if plot.charts]
    return [replace(plot, key=re.sub(r"[^\w:.-]+", "-", plot.key)) for plot in found]

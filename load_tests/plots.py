"""Every plot of a load test, the main one first. A plot is there where the result has its data."""

from collections.abc import Callable, Iterator

from load_tests.latency_plots import context_plots, load_plots, setting_plots
from load_tests.plot import Plot, Subject, subject
from load_tests.run_plots import client_plots, order_plots
from load_tests.server_plots import cache_plots, shift_plots
from load_tests.terms import Result

_MAKERS: tuple[Callable[[Subject], Iterator[Plot]], ...] = (
    context_plots,
    setting_plots,
    load_plots,
    shift_plots,
    cache_plots,
    client_plots,
    order_plots,
)


def plots(result: Result) -> list[Plot]:
    """None where nothing was measured."""
    measured = subject(result)
    return [plot for make in _MAKERS for plot in make(measured) if plot.charts]

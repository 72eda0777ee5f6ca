"""`ropewalk bench`: passes its words on, --help among them. No torch."""

import click


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def bench(words: tuple[str, ...]) -> int:
    """Measure servers and compare encodings."""
    # Late: a server needs neither, and the load generator does not need torch.
    if "--profile-step" in words:
        from ropewalk.load_tests.micro.profile_step import main as profile_main

        return profile_main(words)
    from ropewalk.load_tests.run.bench import main as bench_main

    return bench_main(words)

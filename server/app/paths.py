"""The paths of the API: which of them a request is for, and which one it may have meant."""

from collections.abc import Iterable

from starlette.routing import Route

# What clients get wrong is the part before: a base URL without /v1, or with it twice.
_MOST_BEFORE = 3


class Paths:
    """Knows every route's path, such as /v1/models/{name}."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._paths = [(route.path_regex, route.path_format) for route in routes]

    def template(self, path: str) -> str | None:
        """Of the route for that path; None where there is none."""
        return next((form for regex, form in self._paths if regex.match(path)), None)

    def meant(self, path: str) -> str | None:
        """The path of the API that ends as this one does."""
        parts = path.split("/")[1:]
        for start in range(min(len(parts), _MOST_BEFORE + 1)):
            end = "/" + "/".join(parts[start:])
            for guess in (f"/v1{end}", end):
                if self.template(guess) is not None:
                    return guess
        return None

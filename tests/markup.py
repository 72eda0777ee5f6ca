"""What a page consists of."""

from html.parser import HTMLParser


def elements(page, void):
    """The tags in order, with their attributes. Fails where one is not closed by its own end tag.

    void: tags that need none.
    """
    parser = _Tags(void)
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.seen


class _Tags(HTMLParser):
    def __init__(self, void):
        super().__init__()
        self.void, self.open, self.seen = void, [], []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

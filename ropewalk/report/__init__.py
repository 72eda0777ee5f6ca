"""Reports for people: one style of pictures, one page, one way to each kind of interval."""

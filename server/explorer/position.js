// Position.

panels.push({
  id: "position",
  title: "Position",
  lead: "How much of an attention score is content, and how much is position.",
  mount(root, page) {
    fill(root, element("p", {}, "Nothing here yet."));
  },
});

// Race.

panels.push({
  id: "race",
  title: "Race",
  lead: "One prompt, several models at once: what each encoding costs per token, and what happens past the trained length.",
  mount(root, page) {
    fill(root, element("p", {}, "Nothing here yet."));
  },
});

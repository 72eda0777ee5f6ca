// Talk.

panels.push({
  id: "talk",
  title: "Talk",
  lead: "Write, and watch each token come: how likely it was, what else could have come, and how long it took.",
  mount(root, page) {
    fill(root, element("p", {}, "Nothing here yet."));
  },
});

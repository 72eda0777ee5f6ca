// Load.

panels.push({
  id: "load",
  title: "Load",
  lead: "A small, bounded load from this page: latency and throughput by encoding.",
  mount(root, page) {
    fill(root, element("p", {}, "Nothing here yet."));
  },
});

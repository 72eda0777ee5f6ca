// Cache.

panels.push({
  id: "cache",
  title: "Cache",
  lead: "Every block of the cache as it is now, and what an operation on a sequence does to the stored keys.",
  mount(root, page) {
    fill(root, element("p", {}, "Nothing here yet."));
  },
});

// Proof.

panels.push({
  id: "proof",
  title: "Proof",
  lead: "Appending tokens never changes what is stored before them. Try it, and see the counter-example.",
  mount(root, page) {
    fill(root, element("p", {}, "Nothing here yet."));
  },
});

"use strict";
(() => {
  // What an address names is opened: a file in the map.
  const reveal = () => {
    const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (found && found.tagName === "DETAILS") {
      found.open = true;
      found.scrollIntoView();
    }
  };
  window.addEventListener("hashchange", reveal);
  reveal();

  const form = document.getElementById("filter");
  if (!form) return;
  const entries = [...document.querySelectorAll("[data-words]")];
  const sections = [...document.querySelectorAll("section.list")];
  const texts = entries.map(entry => `${entry.textContent} ${entry.dataset.words}`.toLowerCase());
  const apply = () => {
    const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const profile = form.elements.profile.value;
    const broken = form.elements.broken.checked;
    let shown = 0;
    entries.forEach((entry, i) => {
      const fits = (!profile || entry.closest("section").dataset.profile === profile)
        && (!broken || "broken" in entry.dataset)
        && words.every(word => texts[i].includes(word));
      entry.classList.toggle("out", !fits);
      shown += fits;
    });
    sections.forEach(section => section.classList.toggle("out", !section.querySelector("[data-words]:not(.out)")));
    document.getElementById("shown").textContent = `${shown} of ${entries.length} shown`;
  };
  const asked = new URLSearchParams(location.search);
  form.elements.q.value = asked.get("q") || "";
  form.elements.profile.value = asked.get("profile") || "";
  form.elements.broken.checked = asked.has("broken");
  form.addEventListener("input", apply);
  form.addEventListener("submit", event => { event.preventDefault(); apply(); });
  apply();
})();

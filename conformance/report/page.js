"use strict";
(() => {
  const form = document.getElementById("filter");
  const entries = [...document.querySelectorAll("details[data-verdict]")];
  const parts = [...document.querySelectorAll("section[data-profile]")];
  const texts = entries.map(entry => entry.querySelector("summary").textContent.toLowerCase());
  const apply = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = new Set([...form.querySelectorAll("input[type=checkbox]:checked")].map(box => box.value));
    const profile = form.elements.profile.value;
    let shown = 0;
    entries.forEach((entry, i) => {
      const fits = verdicts.has(entry.dataset.verdict)
        && (!profile || entry.parentNode.dataset.profile === profile)
        && words.every(word => texts[i].includes(word));
      entry.classList.toggle("out", !fits);
      shown += fits;
    });
    parts.forEach(part => part.classList.toggle("out", !part.querySelector("details[data-verdict]:not(.out)")));
    document.getElementById("shown").textContent = `${shown} of ${entries.length} shown`;
  };
  // Opens what an address names, and what is around it, even if the filter hides it.
  const reveal = () => {
    const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!found) return;
    for (let at = found; at; at = at.parentElement) {
      if (at.tagName === "DETAILS") at.open = true;
      at.classList.remove("out");
    }
    found.scrollIntoView();
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  window.addEventListener("hashchange", reveal);
  document.querySelectorAll("button.copy").forEach(button => {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const command = button.parentNode.querySelector("pre");
      try {
        await navigator.clipboard.writeText(command.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(command);
        button.textContent = "Selected";
      }
    });
  });
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("#failures details:not([open])")];
    closed.forEach(details => { details.open = true; });
  });
  window.addEventListener("afterprint", () => closed.forEach(details => { details.open = false; }));
  apply();
  reveal();
})();

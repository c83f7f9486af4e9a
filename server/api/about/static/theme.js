// The theme that was chosen, or the system's, before anything is painted. A classic script: modules run too late.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    let chosen = null;
    try {
      chosen = localStorage.getItem("foresay-theme");
    } catch {
      /* storage may be forbidden */
    }
    document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
  };
  apply();
  dark.addEventListener("change", apply);
})();

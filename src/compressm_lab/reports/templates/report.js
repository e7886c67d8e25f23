"use strict";
const root = document.documentElement;
const button = document.getElementById("theme");
const themes = ["auto", "light", "dark"];
const show = (theme) => {
  root.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
};
let theme = "auto";
try { theme = localStorage.getItem("theme") ?? "auto"; } catch { /* pages from a file may have no storage */ }
show(themes.includes(theme) ? theme : "auto");
button.hidden = false;
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
  show(next);
  try { localStorage.setItem("theme", next); } catch { /* as above */ }
});
// On paper nothing can be opened.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((part) => { part.open = true; });
});
addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));

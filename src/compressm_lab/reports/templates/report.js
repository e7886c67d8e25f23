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
// A slider shows one snapshot of a spectrum at a time; without it, and on paper, all are shown.
document.querySelectorAll(".walk").forEach((walk) => {
  const slider = walk.querySelector("input");
  const words = JSON.parse(slider.dataset.moments);
  const lines = words.map((_, k) => walk.querySelectorAll(`[id$="-moment-${k}"], [id$="-moment-${k}-cut"]`));
  const step = () => {
    walk.querySelectorAll(".now").forEach((line) => line.classList.remove("now"));
    lines[slider.value].forEach((line) => line.classList.add("now"));
    walk.querySelector("output").textContent = words[slider.value];
    slider.setAttribute("aria-valuetext", words[slider.value]);
  };
  slider.addEventListener("input", step);
  walk.classList.add("live");
  walk.querySelector(".slider").hidden = false;
  step();
});
// On paper nothing can be opened.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((part) => { part.open = true; });
});
addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));

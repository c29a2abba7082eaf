"use strict";
(() => {
  const root = document.documentElement;
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });

  // Under the pointer: the step, and every curve's value there, read back from the drawn points.
  const tip = document.getElementById("tip");
  const numbers = (text) => text.split(" ").map(Number);
  const short = (value) => Number(value.toPrecision(3)).toString();
  function show(svg, event) {
    const [x0, x1] = numbers(svg.dataset.x), [y0, y1] = numbers(svg.dataset.y);
    const [left, right, top, bottom] = numbers(svg.dataset.box);
    const frame = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const at = (event.clientX - frame.left) / frame.width * view.width;
    const lines = [];
    let nearest = null;
    for (const line of svg.querySelectorAll(".line")) {
      let best = null;
      for (const point of line.points) if (!best || Math.abs(point.x - at) < Math.abs(best.x - at)) best = point;
      if (!best) continue;
      nearest = nearest ?? best.x;
      lines.push(`${line.dataset.label}  ${short(y0 + (bottom - best.y) / (bottom - top) * (y1 - y0))}`);
    }
    if (nearest === null) return;
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("x1", nearest); cursor.setAttribute("x2", nearest); cursor.style.visibility = "visible";
    const step = Math.round(x0 + (nearest - left) / (right - left) * (x1 - x0));
    tip.textContent = `step ${step}\n${lines.join("\n")}`;
    tip.style.visibility = "visible";
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${Math.max(4, event.clientY - box.height - 12)}px`;
  }
  function hide(svg) { svg.querySelector(".cursor").style.visibility = tip.style.visibility = "hidden"; }
  for (const svg of document.querySelectorAll(".chart svg")) {
    svg.addEventListener("pointermove", (event) => show(svg, event));
    svg.addEventListener("pointerdown", (event) => show(svg, event));
    svg.addEventListener("pointerleave", () => hide(svg));
  }
})();

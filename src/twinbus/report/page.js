"use strict";
// What the page has without this: everything but the hover details and the switch. Texts are set as texts, never as HTML.
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");

  // --- light and dark ---
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (value) => {
    // A page opened from a file may be refused a memory.
    try { return value ? localStorage.setItem("twinbus-theme", value) : localStorage.getItem("twinbus-theme"); } catch { return null; }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const named = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  const asked = location.hash.slice(1);
  const before = ["light", "dark"].includes(asked) ? asked : remembered();
  if (before === "light" || before === "dark") root.dataset.theme = before;
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remembered(root.dataset.theme); named(); });
  system.addEventListener("change", named);
  named();

  // --- details ---
  const show = (lines, x, y) => {
    tip.replaceChildren(...lines.map((cells) => {
      const line = document.createElement("div");
      line.append(...cells.map((cell) => Object.assign(document.createElement("span"), { textContent: cell })));
      return line;
    }));
    tip.hidden = false;
    const room = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, x + 16 + room.width < innerWidth ? x + 16 : x - 16 - room.width)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 16, innerHeight - room.height - 4))}px`;
  };
  const stack = document.querySelector(".stack");
  const cursor = stack && stack.querySelector(".cursor");
  const hide = () => { tip.hidden = true; if (cursor) cursor.hidden = true; };
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });
  for (const one of document.querySelectorAll("[data-tip]")) {
    one.addEventListener("pointermove", (event) => {
      event.stopPropagation();
      if (cursor) cursor.hidden = true;
      show(one.dataset.tip.split(" · ").map((line) => [line]), event.clientX, event.clientY);
    });
    one.addEventListener("pointerleave", hide);
  }
  if (!stack) return;

  // --- over time: the row of the table that belongs to where the pointer is ---
  const [head, ...rows] = document.getElementById("numbers").rows;
  const titles = [...head.cells].map((cell) => cell.textContent);
  let place = -1;
  const point = (to, y) => {
    place = Math.max(0, Math.min(rows.length - 1, to));
    const plot = stack.querySelector(".plot").getBoundingClientRect();
    const x = plot.left + ((place + 0.5) / rows.length) * plot.width;
    cursor.style.left = `${x - stack.getBoundingClientRect().left}px`;
    const cells = [...rows[place].cells].map((cell) => cell.textContent);
    show(cells.map((cell, at) => (at ? [titles[at], cell] : [cell])), x, y);
    cursor.hidden = false;
  };
  const follow = (event) => {
    const plot = stack.querySelector(".plot").getBoundingClientRect();
    const share = (event.clientX - plot.left) / plot.width;
    if (share < 0 || share > 1) hide(); else point(Math.floor(share * rows.length), event.clientY);
  };
  stack.addEventListener("pointermove", follow);
  stack.addEventListener("pointerdown", follow);
  stack.addEventListener("pointerleave", hide);
  stack.addEventListener("blur", hide);
  stack.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -rows.length, End: rows.length }[event.key];
    if (!step) return;
    event.preventDefault();
    point(place + step, stack.querySelector(".plot").getBoundingClientRect().top);
  });
})();

"use strict";
// The page is complete without this script. It adds: tables that can be sorted; times at the pointer, what a task waited for, zoom.
for (const table of document.querySelectorAll(".sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows], numbers = rows.some((row) => "value" in row.cells[column].dataset);
      rows.sort((one, other) => {
        const [a, b] = [value(one, column), value(other, column)];
        if (!numbers) return up ? a.localeCompare(b) : b.localeCompare(a);
        if (a === "-" || b === "-") return (a === "-") - (b === "-"); // without a figure: last in both directions
        return up ? a - b : b - a;
      });
      body.append(...rows);
    });
  });
}

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const svg = document.getElementById("drawing");
  if (!svg) return;
  const { width, least, length, bars } = data;
  const part = (id) => document.getElementById(id);
  const tip = part("tip"), list = part("waits"), path = part("path"), spoken = part("spoken"), axis = part("axis");
  const tasks = [...svg.querySelectorAll(".task")], areas = [...svg.querySelectorAll(".zoomed")];
  const row = (i) => Number(tasks[i].getAttribute("y"));
  let begin = 0, end = length, chain = [], at = -1, dragged = null, moved = false;

  for (const task of tasks) task.firstElementChild.remove(); // the title, which the box at the pointer replaces
  for (const only of document.querySelectorAll(".scripted")) only.hidden = false;
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "application"); // arrow keys are for the drawing
  svg.setAttribute("aria-describedby", "help");

  const seconds = (ns) => {
    const size = Math.abs(ns);
    if (size >= 1e9) return (ns / 1e9).toFixed(3) + " s";
    if (size >= 1e6) return (ns / 1e6).toFixed(2) + " ms";
    return (ns / 1e3).toFixed(1) + " us";
  };
  const x = (ns) => (width * (ns - begin)) / (end - begin);

  function draw() {
    tasks.forEach((task, i) => {
      const from = Math.max(bars[i][1], begin), to = Math.min(bars[i][2], end);
      const hidden = to <= begin || from >= end;
      task.setAttribute("visibility", hidden ? "hidden" : "visible");
      if (hidden) return;
      task.setAttribute("x", x(from).toFixed(2));
      task.setAttribute("width", Math.max(x(to) - x(from), least).toFixed(2));
    });
    const scale = length / (end - begin);
    const move = -(width * begin) / (end - begin);
    for (const area of areas) area.setAttribute("transform", `translate(${move} 0) scale(${scale} 1)`);
    [...axis.children].forEach((label, i) => { label.textContent = seconds(begin + ((end - begin) * i) / 4); });
    connect();
  }

  function connect() {
    const lines = [];
    for (let i = 0; i + 1 < chain.length; i++) {
      const [later, earlier] = [chain[i], chain[i + 1]];
      const middle = (task) => Number(task.getAttribute("y")) + Number(task.getAttribute("height")) / 2;
      const line = document.createElementNS(svg.namespaceURI, "line");
      line.setAttribute("x1", x(bars[earlier][2]));
      line.setAttribute("x2", x(bars[later][1]));
      line.setAttribute("y1", middle(tasks[earlier]));
      line.setAttribute("y2", middle(tasks[later]));
      lines.push(line);
    }
    path.replaceChildren(...lines);
  }

  const waited = (i) => {
    const [, , , cause, byLane] = bars[i];
    if (cause < 0) return "what it waited for was before this iteration";
    return `${byLane ? "its lane was busy with" : "waited for"} ${bars[cause][0]}`;
  };

  function follow(first, most = 20) {
    chain = [];
    for (let i = first; i >= 0 && !chain.includes(i); i = bars[i][3]) chain.push(i);
    tasks.forEach((task, i) => task.classList.toggle("on", chain.includes(i)));
    svg.classList.toggle("following", chain.length > 0);
    list.replaceChildren(...chain.slice(0, most).map((i) => {
      const item = document.createElement("li");
      item.textContent = `${bars[i][0]}: ${seconds(bars[i][1])} to ${seconds(bars[i][2])}; ${waited(i)}`;
      return item;
    }));
    if (chain.length > most) {
      const item = document.createElement("li"), all = document.createElement("button");
      all.type = "button";
      all.textContent = `All ${chain.length} steps`;
      all.addEventListener("click", () => follow(first, Infinity));
      item.append(all);
      list.append(item);
    }
    connect();
  }

  function zoom(factor, at) {
    const span = Math.min(length, Math.max((end - begin) * factor, length / 5000));
    begin = Math.min(Math.max(at - ((at - begin) * span) / (end - begin), 0), length - span);
    end = begin + span;
    draw();
  }

  const words = (i) => `${bars[i][0]}\n${seconds(bars[i][1])} to ${seconds(bars[i][2])}, ${seconds(bars[i][2] - bars[i][1])}\n${waited(i)}`;

  function show(i, left, top) {
    tip.style.display = i < 0 ? "none" : "block";
    if (i < 0) return;
    tip.textContent = words(i);
    tip.style.left = Math.max(4, Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.min(top, window.innerHeight - tip.offsetHeight - 4) + "px";
  }

  function go(i) {
    at = i;
    tasks.forEach((task, other) => task.classList.toggle("at", other === i));
    if (i < 0) { show(-1); return; }
    const [, from, to] = bars[i], span = end - begin;
    if (to <= begin || from >= end) { // outside of what is zoomed in on
      begin = Math.min(Math.max((from + to - span) / 2, 0), length - span);
      end = begin + span;
      draw();
    }
    const box = tasks[i].getBoundingClientRect();
    show(i, box.left, box.bottom + 8);
    spoken.textContent = words(i);
  }

  function step(key) {
    const inside = bars.map((_, i) => i).filter((i) => bars[i][1] < length).sort((a, b) => bars[a][1] - bars[b][1]);
    if (at < 0) return inside.find((i) => row(i) === Math.min(...inside.map(row)));
    const ahead = key === "ArrowRight" || key === "ArrowDown";
    if (key === "ArrowRight" || key === "ArrowLeft") {
      const lane = inside.filter((i) => row(i) === row(at));
      return lane[lane.indexOf(at) + (ahead ? 1 : -1)] ?? at;
    }
    const rows = [...new Set(inside.map(row))].sort((a, b) => a - b), next = rows[rows.indexOf(row(at)) + (ahead ? 1 : -1)];
    const away = (i) => Math.abs(bars[i][1] - bars[at][1]);
    return inside.filter((i) => row(i) === next).sort((a, b) => away(a) - away(b))[0] ?? at;
  }

  function reset() {
    begin = 0;
    end = length;
    go(-1);
    follow(-1);
    draw();
  }

  const middle = () => (at < 0 ? (begin + end) / 2 : (bars[at][1] + bars[at][2]) / 2);
  const keys = { "+": () => zoom(0.8, middle()), "=": () => zoom(0.8, middle()), "-": () => zoom(1.25, middle()), Escape: reset };
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) go(step(event.key));
    else if (event.key === "Enter" && at >= 0) follow(at);
    else if (event.key in keys) keys[event.key]();
    else return;
    event.preventDefault();
  });
  svg.addEventListener("blur", () => show(-1));
  window.addEventListener("scroll", () => show(-1), { passive: true });

  const time = (event) => {
    const box = svg.getBoundingClientRect();
    return begin + ((event.clientX - box.left) / box.width) * (end - begin);
  };
  const pointed = (event) => {
    const task = event.target.closest(".task");
    return task ? Number(task.dataset.task) : -1;
  };
  svg.addEventListener("pointermove", (event) => {
    if (dragged !== null && event.buttons) {
      const shift = Math.min(Math.max(dragged - time(event), -begin), length - end);
      if (shift !== 0) moved = true;
      begin += shift;
      end += shift;
      draw();
    }
    show(pointed(event), event.clientX + 14, event.clientY + 16);
  });
  svg.addEventListener("pointerleave", () => show(-1));
  svg.addEventListener("pointerdown", (event) => {
    dragged = time(event);
    moved = false;
  });
  window.addEventListener("pointerup", () => { dragged = null; });
  window.addEventListener("pointercancel", () => { dragged = null; });
  svg.addEventListener("click", (event) => {
    if (moved) return; // the end of a drag
    const i = pointed(event);
    follow(i);
    show(i, event.clientX + 14, event.clientY + 16);
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, time(event));
  }, { passive: false });
  part("reset").addEventListener("click", reset);
  part("in").addEventListener("click", () => zoom(0.5, middle()));
  part("out").addEventListener("click", () => zoom(2, middle()));
  part("chain").addEventListener("click", () => follow(data.last));
})();

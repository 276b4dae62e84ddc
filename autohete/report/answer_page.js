"use strict";
// The drawing is complete without this script. It adds: times at the pointer, what a task waited for, zoom.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const svg = document.getElementById("drawing");
  if (!svg) return;
  const { left, width, least, length, bars } = data;
  const tip = document.getElementById("tip"), list = document.getElementById("waits"), path = document.getElementById("path");
  const tasks = [...svg.querySelectorAll(".task")], areas = [...svg.querySelectorAll(".zoomed")];
  const axis = document.getElementById("axis"), ticksY = axis.firstElementChild.getAttribute("y");
  let begin = 0, end = length, chain = [], dragged = null;

  for (const task of tasks) task.firstElementChild.remove(); // the title, which the box at the pointer replaces

  const seconds = (ns) => {
    const size = Math.abs(ns);
    if (size >= 1e9) return (ns / 1e9).toFixed(3) + " s";
    if (size >= 1e6) return (ns / 1e6).toFixed(2) + " ms";
    return (ns / 1e3).toFixed(1) + " us";
  };
  const x = (ns) => left + (width * (ns - begin)) / (end - begin);

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
    const move = left - scale * left - (width * begin) / (end - begin);
    for (const area of areas) area.setAttribute("transform", `translate(${move} 0) scale(${scale} 1)`);
    axis.replaceChildren(...[0, 1, 2, 3].map((part) => {
      const label = document.createElementNS(svg.namespaceURI, "text");
      label.setAttribute("x", left + (width * part) / 4);
      label.setAttribute("y", ticksY);
      label.textContent = seconds(begin + ((end - begin) * part) / 4);
      return label;
    }));
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
    if (cause < 0) return "waited for nothing in this iteration";
    return `${byLane ? "its lane was busy with" : "waited for"} ${bars[cause][0]}`;
  };

  function follow(first) {
    chain = [];
    for (let i = first; i >= 0 && !chain.includes(i); i = bars[i][3]) chain.push(i);
    tasks.forEach((task, i) => task.classList.toggle("on", chain.includes(i)));
    svg.classList.toggle("following", chain.length > 0);
    list.replaceChildren(...chain.map((i) => {
      const item = document.createElement("li");
      item.textContent = `${bars[i][0]}: ${seconds(bars[i][1])} to ${seconds(bars[i][2])}; ${waited(i)}`;
      return item;
    }));
    connect();
  }

  function zoom(factor, at) {
    const span = Math.min(length, Math.max((end - begin) * factor, length / 5000));
    begin = Math.min(Math.max(at - ((at - begin) * span) / (end - begin), 0), length - span);
    end = begin + span;
    draw();
  }

  const time = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    return begin + (((event.clientX - box.left) * scale - left) / width) * (end - begin);
  };

  svg.addEventListener("pointermove", (event) => {
    if (dragged !== null && event.buttons) {
      const shift = Math.min(Math.max(dragged - time(event), -begin), length - end);
      begin += shift;
      end += shift;
      draw();
    }
    const task = event.target.closest(".task");
    tip.style.display = task ? "block" : "none";
    if (!task) return;
    const i = Number(task.dataset.task), [name, from, to] = bars[i];
    tip.textContent = `${name}\n${seconds(from)} to ${seconds(to)}, ${seconds(to - from)}\n${waited(i)}`;
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 400) + "px";
    tip.style.top = event.clientY + 16 + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  svg.addEventListener("pointerdown", (event) => { dragged = time(event); });
  window.addEventListener("pointerup", () => { dragged = null; });
  svg.addEventListener("click", (event) => {
    const task = event.target.closest(".task");
    follow(task ? Number(task.dataset.task) : -1);
  });
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, time(event));
  }, { passive: false });
  document.getElementById("reset").addEventListener("click", () => {
    begin = 0;
    end = length;
    follow(-1);
    draw();
  });
  document.getElementById("chain").addEventListener("click", () => follow(data.last));
})();

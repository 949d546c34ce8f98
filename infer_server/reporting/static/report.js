// Sorts and filters tables, moves and colours the graph, and shows the details of a kernel. The page works without it.
"use strict";
(() => {
  const kernels = JSON.parse(document.getElementById("data").textContent);
  const find = (selector, root = document) => [...root.querySelectorAll(selector)];
  const NS = "http://www.w3.org/2000/svg";

  // ---- tables
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v !== undefined ? cell.dataset.v : cell.textContent;
  };
  const sortBy = (table, heading) => {
    const column = heading.cellIndex, body = table.tBodies[0];
    const numeric = heading.classList.contains("number") || heading.classList.contains("share");
    const order = heading.getAttribute("aria-sort") === (numeric ? "descending" : "ascending") ? "other" : "first";
    const descending = numeric === (order === "first");
    const keyed = [...body.rows].map(row => [valueOf(row, column), row]);
    keyed.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");      // unknown values are last in both orders
      const by = numeric ? parseFloat(a) - parseFloat(b) : a.localeCompare(b, "en", {numeric: true});
      return descending ? -by : by;
    });
    body.append(...keyed.map(([, row]) => row));
    find("th", table).forEach(other => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  };
  find("table.sortable").forEach(table => find("th button", table).forEach(button =>
    button.addEventListener("click", () => sortBy(table, button.parentElement))));

  const filter = document.getElementById("filter");
  const applyFilter = () => {
    const text = filter.value.toLowerCase();
    find("#kernels tbody tr").forEach(row => {
      const all = `${row.textContent}\n${kernels[+row.dataset.k].fuses.join("\n")}`;
      row.hidden = !all.toLowerCase().includes(text);
    });
  };
  if (filter) filter.addEventListener("input", applyFilter);

  // ---- details of a kernel
  const details = document.getElementById("details");
  const round = value => value === null || value === undefined ? null : +value.toPrecision(3);
  const show = (first, last) => {
    if (!details) return;
    const add = (parent, tag, text) => {
      const made = document.createElement(tag);
      if (text !== undefined) made.textContent = text;
      parent.append(made);
      return made;
    };
    details.replaceChildren();
    const one = kernels[first];
    add(details, "h3", last > first ? `${last - first + 1} kernels, the first of them:` : one.ops);
    const list = add(details, "dl");
    const rows = [["kernel", one.name], ["operators", one.ops], ["result", one.shape], ["precision", one.precision],
      ["tactic", one.tactic], ["time", one.us && `${round(one.us)} µs`],
      ["bound", one.bound !== null && `${round(one.bound)} µs by ${one.limit}`],
      ["work", one.macs && `${round(one.macs / 1e6)} M MAC`], ["memory", one.bytes && `${round(one.bytes / 1e3)} KB`],
      ["SQNR", one.sqnr !== null && `${round(one.sqnr)} dB`],
      ["accuracy cost", one.noise !== null && `${round(100 * one.noise)} % of the noise`],
      ["reference", one.reason], ["ONNX nodes", one.fuses.join(", ")]];
    for (const [label, value] of rows) {
      if (!value) continue;
      const row = add(list, "div");
      add(row, "dt", label);
      add(row, "dd", value);
    }
    const link = add(add(details, "p"), "a", "Show in the table");
    link.href = `#k${first}`;
    find(".chosen").forEach(other => other.classList.remove("chosen"));
    const row = document.getElementById(`k${first}`);
    if (row) row.classList.add("chosen");
    const box = boxOf(first);
    if (box) box.classList.add("chosen");
  };
  const boxOf = index => find("#graph .box[data-k]").find(box =>
    +box.dataset.k <= index && index <= +(box.dataset.last || box.dataset.k));
  const choose = () => {
    const found = /^#k(\d+)$/.exec(location.hash);
    if (!found || !kernels[+found[1]]) return;
    const row = document.getElementById(`k${found[1]}`);
    if (row && row.hidden) {
      filter.value = "";
      applyFilter();
      row.scrollIntoView();
    }
    show(+found[1]);
    centre(boxOf(+found[1]));
  };
  const table = document.getElementById("kernels");
  if (table) table.addEventListener("click", event => {
    const row = event.target.closest("tr[data-k]");
    if (row && !event.target.closest("a")) {
      show(+row.dataset.k);
      centre(boxOf(+row.dataset.k));
    }
  });

  // ---- graph
  const graph = document.getElementById("graph");
  const view = {scale: 1, x: 0, y: 0};
  let size = {width: 1, height: 1};
  const draw = () => graph.firstElementChild.setAttribute("transform",
    `translate(${view.x.toFixed(2)} ${view.y.toFixed(2)}) scale(${view.scale.toFixed(4)})`);
  const zoom = (factor, x = graph.clientWidth / 2, y = graph.clientHeight / 2) => {
    const scale = Math.min(Math.max(view.scale * factor, 0.01), 8);
    view.x = x - (x - view.x) * scale / view.scale;
    view.y = y - (y - view.y) * scale / view.scale;
    view.scale = scale;
    draw();
  };
  const place = scale => {
    view.scale = scale;
    view.x = (graph.clientWidth - size.width * scale) / 2;
    view.y = Math.max((graph.clientHeight - size.height * scale) / 2, 0);
    draw();
  };
  const fit = () => place(Math.min(graph.clientWidth / size.width, graph.clientHeight / size.height, 1));
  const centre = box => {
    if (!box) return;
    const [, x, y] = /translate\(([-\d.]+) ([-\d.]+)\)/.exec(box.getAttribute("transform")).map(Number);
    view.scale = Math.max(view.scale, 0.7);
    view.x = graph.clientWidth / 2 - (x + 105) * view.scale;
    view.y = graph.clientHeight / 2 - (y + 26) * view.scale;
    draw();
  };
  if (graph) {
    const [, , width, height] = graph.getAttribute("viewBox").split(" ").map(Number);
    size = {width, height};
    graph.removeAttribute("viewBox");
    place(Math.max(Math.min(graph.clientWidth / width, 1), Math.min(0.35, graph.clientHeight / height)));
    view.y = 0;
    draw();
    graph.addEventListener("wheel", event => {
      if (document.activeElement !== graph && !event.ctrlKey) return;     // the wheel scrolls the page
      const within = graph.getBoundingClientRect();
      event.preventDefault();
      zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - within.left,
        event.clientY - within.top);
    }, {passive: false});
    const pointers = new Map();
    let moved = 0;
    graph.addEventListener("pointerdown", event => {
      graph.focus({preventScroll: true});
      pointers.set(event.pointerId, event);
      moved = 0;
    });
    graph.addEventListener("pointermove", event => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const others = [...pointers.values()].filter(other => other.pointerId !== event.pointerId);
      if (others.length) {
        const other = others[0], within = graph.getBoundingClientRect();
        const apart = point => Math.hypot(point.clientX - other.clientX, point.clientY - other.clientY);
        zoom(apart(event) / Math.max(apart(before), 1), (event.clientX + other.clientX) / 2 - within.left,
          (event.clientY + other.clientY) / 2 - within.top);
      }
      const share = 1 / pointers.size;
      view.x += (event.clientX - before.clientX) * share;
      view.y += (event.clientY - before.clientY) * share;
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (moved > 4) graph.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, event);
      draw();
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"])
      graph.addEventListener(end, event => pointers.delete(event.pointerId));
    graph.addEventListener("click", event => {
      const box = event.target.closest(".box[data-k]");
      if (box && moved <= 4) show(+box.dataset.k, +(box.dataset.last || box.dataset.k));
    });
    graph.addEventListener("keydown", event => {
      const step = {ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60]}[event.key];
      if (step) { view.x += step[0]; view.y += step[1]; draw(); }
      else if (event.key === "+" || event.key === "=") zoom(1.25);
      else if (event.key === "-") zoom(0.8);
      else if (event.key === "0") fit();
      else return;
      event.preventDefault();
    });
    find("[data-zoom]").forEach(button => button.addEventListener("click", () =>
      ({in: () => zoom(1.4), out: () => zoom(1 / 1.4), fit})[button.dataset.zoom]()));
    find("input[name=colour]").forEach(input => input.addEventListener("change", () => {
      document.getElementById("drawing").className = `drawing by-${input.value}`;
    }));
  }

  // ---- names of the points of charts
  find(".chart a[href^='#k']").forEach(link => {
    const one = kernels[+link.getAttribute("href").slice(2)];
    if (!one) return;
    const title = document.createElementNS(NS, "title");
    title.textContent = [one.name, one.ops, one.us && `${round(one.us)} µs`, one.sqnr !== null && `${round(one.sqnr)} dB`]
      .filter(Boolean).join("\n");
    link.prepend(title);
  });
  addEventListener("hashchange", choose);
  choose();
})();

// The live dashboard of one run: an ES module for anywidget, written by hand, without a build and without any request.
//
// The kernel's main thread is busy while a cell runs, so nothing here may wait for an answer: everything arrives in
// messages (notebook/feed.py describes them) and the page keeps its own copy of the curves in a `Store`, one for each
// dashboard, which any number of views draw. All text reaches the page through textContent.

// ---------------------------------------------------------------------------------------------------------- numbers

const known = (v) => v !== null && v !== undefined && Number.isFinite(v);

/** Four significant digits, without noise. */
function number(v) {
  if (typeof v === "string") return v; // "nan", "inf": words, as JSON has no such numbers
  if (v === null || v === undefined) return "n/a";
  if (!Number.isFinite(v)) return Number.isNaN(v) ? "nan" : v > 0 ? "inf" : "-inf";
  const size = Math.abs(v);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return v.toExponential(2).replace("e+", "e");
  return String(Number(v.toPrecision(size >= 1000 && Number.isInteger(v) ? 7 : 4)));
}

function bytes(v) {
  if (!known(v)) return "n/a";
  if (v < 2 ** 20) return `${(v / 1024).toFixed(1)} KiB`;
  return v >= 2 ** 30 ? `${(v / 2 ** 30).toFixed(2)} GiB` : `${(v / 2 ** 20).toFixed(1)} MiB`;
}

function seconds(v) {
  if (!known(v)) return "n/a";
  return v < 1 ? `${Number((v * 1000).toPrecision(3))} ms` : `${Number(v.toPrecision(3))} s`;
}

function duration(v) {
  if (!known(v)) return "n/a";
  const s = Math.max(0, Math.round(v));
  const two = (n) => String(n).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

/** Places for grid lines between two numbers. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(Number((i * step).toPrecision(12)));
  return out;
}

// ------------------------------------------------------------------------------------------------------------- data

const KEYFRAME = 1, STEPS = 2, TIMES = 4; // flags of a chunk
const RECORD = 48; // bytes of a chunk's record
const MOST_POINTS = 16384; // of one curve in the page; beyond, the older ones are thinned

/** The points of one metric of one rank. */
class Curve {
  constructor() {
    this.clear();
    this.total = 0; // points the kernel has sent so far, thinned ones counted too
    this.gap = false; // some never arrived: the next keyframe replaces the curve
  }

  clear() {
    this.n = 0;
    this.every = 1;
    this.step = new Float64Array(256);
    this.time = new Float32Array(256);
    this.value = new Float32Array(256);
  }

  push(step, time, value) {
    if (this.n === this.step.length) {
      if (this.n >= MOST_POINTS) this.thin();
      else for (const key of ["step", "time", "value"]) {
        const grown = new this[key].constructor(this.n * 2);
        grown.set(this[key]);
        this[key] = grown;
      }
    }
    this.step[this.n] = step;
    this.time[this.n] = time;
    this.value[this.n++] = value;
  }

  /** Keep the smallest and the largest of each four neighbours: peaks and gaps survive. */
  thin() {
    let kept = 0;
    for (let i = 0; i + 4 <= this.n; i += 4) {
      let low = i, high = i;
      for (let k = i; k < i + 4; k++) {
        if (Number.isNaN(this.value[k])) { low = k; break; }
        if (this.value[k] < this.value[low]) low = k;
        if (this.value[k] > this.value[high]) high = k;
      }
      if (low === high) high = low === i + 3 ? i : i + 3;
      for (const k of i === 0 ? [0, Math.max(low, high)] : [Math.min(low, high), Math.max(low, high)]) {
        this.step[kept] = this.step[k];
        this.time[kept] = this.time[k];
        this.value[kept++] = this.value[k];
      }
    }
    this.n = kept;
    this.every *= 2;
  }
}

/** Everything the kernel has told about a run. */
class Store {
  constructor() {
    this.curves = new Map(); // "metric\0rank index" -> Curve
    this.names = [];
    this.ranks = [];
    this.state = null;
    this.text = new Map(); // rank -> the end of its output
    this.seq = 0;
    this.missed = 0;
    this.version = 0;
    this.elapsed = 0;
    this.heardAt = performance.now();
    this.listeners = new Set();
  }

  curve(name, rank) {
    return this.curves.get(`${name}\0${rank}`);
  }

  receive(content, buffers) {
    if (content.type !== "delta") return;
    if (content.seq === 1) this.seq = 0;
    if (content.seq > this.seq + 1 && this.seq > 0) this.missed += content.seq - this.seq - 1;
    this.seq = content.seq;
    this.names = content.names;
    this.ranks = content.ranks;
    this.elapsed = content.elapsed_s;
    this.heardAt = performance.now();
    if (content.state) this.state = content.state;
    for (const [rank, text] of Object.entries(content.text || {})) this.text.set(Number(rank), text);
    if (buffers.length === 2) this.unpack(content.names, buffers[0], buffers[1]);
    this.version++;
    for (const listener of this.listeners) listener();
  }

  unpack(names, head, body) {
    const view = new DataView(head.buffer, head.byteOffset, head.byteLength);
    const copy = body.byteOffset % 4 ? body.buffer.slice(body.byteOffset, body.byteOffset + body.byteLength) : body.buffer;
    const floats = new Float32Array(copy, body.byteOffset % 4 ? 0 : body.byteOffset, body.byteLength >> 2);
    let at = 0;
    for (let o = 0; o < head.byteLength; o += RECORD) {
      const name = view.getUint16(o, true), rank = view.getUint16(o + 2, true), flags = view.getUint32(o + 4, true);
      const n = view.getUint32(o + 8, true), before = view.getUint32(o + 12, true), total = view.getUint32(o + 16, true);
      const every = view.getUint32(o + 20, true), step0 = view.getFloat64(o + 24, true), stride = view.getFloat32(o + 32, true);
      const t0 = view.getFloat32(o + 36, true), t1 = view.getFloat32(o + 40, true);
      const values = at, steps = at + n, times = at + n + (flags & STEPS ? n : 0);
      at = times + (flags & TIMES ? n : 0);
      const key = `${names[name]}\0${rank}`;
      let curve = this.curves.get(key);
      if (!curve) this.curves.set(key, (curve = new Curve()));
      if (flags & KEYFRAME || before === 0) {
        if (curve.total === total && !curve.gap) continue; // what is here is finer
        curve.clear(); // the curve from its beginning
        curve.gap = false;
      } else if (before !== curve.total) {
        if (total <= curve.total) continue;
        curve.gap = true;
      }
      for (let i = 0; i < n; i++) {
        curve.push(
          flags & STEPS ? step0 + floats[steps + i] : step0 + i * stride,
          flags & TIMES ? floats[times + i] : n > 1 ? t0 + ((t1 - t0) * i) / (n - 1) : t1,
          floats[values + i],
        );
      }
      const here = flags & KEYFRAME ? every : Math.max(every, n ? Math.round((total - before) / n) : 1);
      curve.every = Math.max(curve.every, here);
      curve.total = total;
    }
  }
}

const stores = new Map(); // id of a dashboard -> Store; anywidget hands each hook a model object of its own

function storeOf(model) {
  const { id } = model.get("meta");
  if (!stores.has(id)) stores.set(id, new Store());
  return stores.get(id);
}

/** Means of one curve in `cells` cells between x0 and x1; between points the curve is interpolated, NaN breaks it. */
function resample(curve, axis, x0, x1, cells, weight) {
  const sum = new Float64Array(cells), hits = new Uint32Array(cells), broken = new Uint8Array(cells);
  const xs = curve[axis], scale = (cells - 1) / (x1 - x0 || 1);
  const smooth = smoother(weight);
  for (let i = 0; i < curve.n; i++) {
    const v = smooth(curve.value[i]);
    const c = Math.round((xs[i] - x0) * scale);
    if (c < 0 || c >= cells) continue;
    if (Number.isFinite(v)) { sum[c] += v; hits[c]++; } else broken[c] = 1;
  }
  const out = new Float32Array(cells).fill(NaN);
  let last = -1;
  for (let c = 0; c < cells; c++) {
    if (!hits[c]) { if (broken[c]) last = -1; continue; }
    out[c] = sum[c] / hits[c];
    if (last >= 0) for (let k = last + 1; k < c; k++) out[k] = out[last] + ((out[c] - out[last]) * (k - last)) / (c - last);
    last = c;
  }
  return out;
}

/** Exponential moving average that starts unbiased; begins anew after a value that is not finite. */
function smoother(weight) {
  if (!weight) return (v) => v;
  let mean = 0, mass = 0;
  return (v) => {
    if (!Number.isFinite(v)) { mean = mass = 0; return v; }
    mean = weight * mean + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  };
}

// -------------------------------------------------------------------------------------------------------------- page

/** An element with properties and children; strings become text. */
function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value);
  }
  // JupyterLab's own keys (d d deletes a cell) must not act on what is typed here; it looks at the focused element.
  if ("tabindex" in props || FOCUSABLE.has(tag)) node.setAttribute("data-lm-suppress-shortcuts", "true");
  node.append(...children);
  return node;
}

const FOCUSABLE = new Set(["button", "input", "select"]);

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A row of buttons of which one is pressed. */
function choice(label, options, chosen, pick) {
  const group = h("span", { class: "nbd-choice", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    const button = h("button", { type: "button", title: text, "aria-pressed": String(value === chosen) }, text);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      pick(value);
    });
    group.append(button);
  }
  return group;
}

const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

// ------------------------------------------------------------------------------------------------------------ curves

const HEIGHT = 250, STRIP = 132, LEFT = 56, RIGHT = 12, TOP = 10, BOTTOM = 24;

/** Curves of one metric, with the values of all ranks at a step, zoom, smoothing, and a heat strip for many ranks. */
class Plot {
  constructor(view) {
    this.view = view;
    this.name = null;
    this.axis = "step";
    this.log = false;
    this.weight = 0;
    this.zoom = null; // [x0, x1]; null: everything
    this.at = null; // x under the pointer
    this.on = null; // Set of rank indices that are drawn as lines
    this.mean = true;
    this.drawMs = 0;
    this.build();
  }

  build() {
    const redraw = () => this.view.schedule();
    this.metrics = h("span");
    this.tools = h("div", { class: "nbd-tools" }, this.metrics, h("span", { class: "nbd-spring" }),
      choice("x axis", [["step", "step"], ["time", "time"]], "step", (v) => { this.axis = v; this.zoom = null; redraw(); }),
      choice("y axis", [[false, "linear"], [true, "log"]], false, (v) => { this.log = v; redraw(); }),
      h("label", {}, "smooth", h("input", {
        type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing",
        oninput: (e) => { this.weight = Number(e.target.value); redraw(); },
      })),
      (this.reset = h("button", { class: "nbd-button", type: "button", hidden: "", onclick: () => this.setZoom(null) }, "Whole run")));
    this.canvas = h("canvas", { tabindex: 0, role: "img", height: HEIGHT });
    this.over = h("canvas", { "aria-hidden": "true" });
    this.tip = h("div", { class: "nbd-tip", hidden: "" });
    this.empty = h("div", { class: "nbd-empty" }, "Waiting for the first numbers");
    this.plot = h("div", { class: "nbd-plot" }, this.canvas, this.over, this.empty, this.tip);
    this.strip = h("canvas", { role: "img" });
    this.stripNote = h("div", { class: "nbd-note" });
    this.stripBox = h("div", { class: "nbd-plot", hidden: "" }, this.strip);
    this.chips = h("div", { class: "nbd-chips", role: "group", "aria-label": "ranks shown" });
    this.note = h("div", { class: "nbd-note" });
    this.node = h("section", { class: "nbd-panel", "aria-label": "curves" }, this.tools, this.plot, this.stripBox,
      this.stripNote, this.chips, this.note);
    this.listen();
  }

  listen() {
    const c = this.canvas;
    const x = (e) => this.toX(e.clientX - c.getBoundingClientRect().left);
    let from = null;
    c.addEventListener("pointermove", (e) => { this.at = x(e); if (from !== null) this.drag = [from, this.at]; this.overlay(); });
    c.addEventListener("pointerleave", () => { if (from === null) { this.at = null; this.overlay(); } });
    c.addEventListener("pointerdown", (e) => { if (e.button === 0) { from = x(e); c.setPointerCapture(e.pointerId); } });
    c.addEventListener("pointerup", (e) => {
      const [a, b] = [from ?? 0, x(e)].sort((p, q) => p - q);
      if (from !== null && this.drag && this.toPx(b) - this.toPx(a) > 6) this.setZoom([a, b]);
      from = this.drag = null;
      this.overlay();
    });
    c.addEventListener("dblclick", () => this.setZoom(null));
    c.addEventListener("wheel", (e) => {
      if (!e.ctrlKey) return; // a plain wheel scrolls the notebook
      e.preventDefault();
      this.scale(e.deltaY > 0 ? 1.25 : 0.8, x(e));
    }, { passive: false });
    c.addEventListener("keydown", (e) => {
      const [x0, x1] = this.range;
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[e.key];
      if (move) this.at = Math.min(x1, Math.max(x0, (this.at ?? (move > 0 ? x0 : x1)) + (move * (x1 - x0)) / 100));
      else if (e.key === "Home") this.at = x0;
      else if (e.key === "End") this.at = x1;
      else if (e.key === "+" || e.key === "=") this.scale(0.7, this.at ?? (x0 + x1) / 2);
      else if (e.key === "-") this.scale(1.4, this.at ?? (x0 + x1) / 2);
      else if (e.key === "Escape" || e.key === "0") { this.at = null; this.setZoom(null); }
      else return;
      e.preventDefault();
      e.stopPropagation();
      this.overlay(true);
    });
    c.addEventListener("blur", () => { this.at = null; this.overlay(); });
  }

  setZoom(range) {
    this.zoom = range && range[1] > range[0] ? range : null;
    this.reset.hidden = !this.zoom;
    this.view.schedule();
  }

  scale(by, about) {
    const [x0, x1] = this.range;
    const next = [about - (about - x0) * by, about + (x1 - about) * by];
    const [a, b] = this.whole;
    this.setZoom(next[0] <= a && next[1] >= b ? null : [Math.max(a, next[0]), Math.min(b, next[1])]);
  }

  toPx(x) { return LEFT + ((x - this.range[0]) / (this.range[1] - this.range[0] || 1)) * this.inner; }
  toX(px) { return this.range[0] + ((px - LEFT) / this.inner) * (this.range[1] - this.range[0]); }
  toPy(v) {
    const [a, b] = this.yrange;
    const f = this.log ? (Math.log10(v) - a) / (b - a || 1) : (v - a) / (b - a || 1);
    return TOP + (1 - f) * (HEIGHT - TOP - BOTTOM);
  }

  get inner() { return Math.max(10, this.width - LEFT - RIGHT); }
  get many() { return this.view.store.ranks.length > this.view.meta.many; }
  colour(rank) { return this.view.meta.rank_colours[rank % this.view.meta.rank_colours.length]; }
  dash(rank) { return DASHES[Math.floor(rank / this.view.meta.rank_colours.length) % DASHES.length]; }

  /** Rank indices that have logged the chosen metric. */
  ranks() {
    return this.view.store.ranks.map((_, i) => i).filter((i) => this.view.store.curve(this.name, i)?.n);
  }

  controls() {
    const { names, ranks } = this.view.store;
    if (this.name === null || !names.includes(this.name)) this.name = names[0] ?? null;
    const key = names.join("\0");
    if (key !== this.metricsKey) {
      this.metricsKey = key;
      const pick = (name) => { this.name = name; this.view.schedule(); };
      if (names.length <= 5) this.metrics.replaceChildren(choice("metric", names.map((n) => [n, n]), this.name, pick));
      else {
        const select = h("select", { "aria-label": "metric", onchange: (e) => pick(e.target.value) },
          ...names.map((n) => h("option", n === this.name ? { value: n, selected: "" } : { value: n }, n)));
        this.metrics.replaceChildren(select);
      }
    }
    if (this.chipsKey !== ranks.join()) {
      this.chipsKey = ranks.join();
      this.on = new Set(this.many ? [] : ranks.keys());
      const press = (chip, yes) => chip.setAttribute("aria-pressed", String(yes));
      const chips = ranks.map((rank, i) => {
        const line = h("i", { style: { borderColor: this.colour(i), borderTopStyle: this.dash(i).length ? "dashed" : "solid" } });
        const chip = h("button", { class: "nbd-chip", type: "button", title: `rank ${rank}`, "aria-pressed": String(this.on.has(i)) },
          line, this.many ? String(rank) : `rank ${rank}`);
        chip.addEventListener("click", () => {
          if (!this.on.delete(i)) this.on.add(i);
          press(chip, this.on.has(i));
          this.view.schedule();
        });
        return chip;
      });
      this.chips.replaceChildren(...chips);
      if (ranks.length > 1) {
        const mean = h("button", { class: "nbd-chip", type: "button", "aria-pressed": "true" },
          h("i", { style: { borderColor: "currentColor", borderTopStyle: "dashed" } }), `mean and spread of ${ranks.length} ranks`);
        mean.addEventListener("click", () => { this.mean = !this.mean; press(mean, this.mean); this.view.schedule(); });
        this.chips.prepend(mean);
      }
    }
  }

  /** Limits of x over the whole run and of what is shown, and of y over what is drawn. */
  limits(ranks) {
    let a = Infinity, b = -Infinity;
    for (const rank of ranks) {
      const curve = this.view.store.curve(this.name, rank), xs = curve[this.axis];
      for (let i = 0; i < curve.n; i++) { if (xs[i] < a) a = xs[i]; if (xs[i] > b) b = xs[i]; }
    }
    if (a > b) { a = 0; b = 1; }
    if (a === b) { a -= 0.5; b += 0.5; }
    this.whole = [a, b];
    this.range = this.zoom ?? this.whole;
  }

  yLimits(ranks) {
    const [x0, x1] = this.range;
    let low = Infinity, high = -Infinity;
    this.hiddenByLog = 0;
    for (const rank of ranks) {
      const curve = this.view.store.curve(this.name, rank), xs = curve[this.axis];
      for (let i = 0; i < curve.n; i++) {
        const v = curve.value[i];
        if (xs[i] < x0 || xs[i] > x1 || !Number.isFinite(v)) continue;
        if (this.log && v <= 0) { this.hiddenByLog++; continue; }
        if (v < low) low = v;
        if (v > high) high = v;
      }
    }
    if (low > high) { low = this.log ? 0.1 : 0; high = 1; }
    if (this.log) { low = Math.log10(low); high = Math.log10(high); }
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
    this.yrange = [low - pad, high + pad];
  }

  draw() {
    const began = performance.now();
    this.controls();
    const ranks = this.ranks();
    const width = Math.round(this.plot.clientWidth), ratio = window.devicePixelRatio || 1;
    if (!width) return;
    this.width = width;
    this.empty.hidden = ranks.length > 0;
    say(this.empty, this.view.store.state?.status === "running" || !this.view.store.state
      ? "Waiting for the first numbers" : "No metric was logged: nbdist.log(loss=loss)");
    this.limits(ranks);
    this.yLimits(this.many ? ranks : ranks.filter((r) => this.on.has(r)).length ? ranks.filter((r) => this.on.has(r)) : ranks);
    const g = size(this.canvas, width, HEIGHT, ratio), ink = this.view.ink;
    g.clearRect(0, 0, width, HEIGHT);
    this.axes(g, ink);
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, this.inner, HEIGHT - BOTTOM + 1);
    g.clip();
    const cells = Math.min(480, Math.max(2, this.inner >> 1));
    const rows = ranks.length > 1 && (this.mean || this.many)
      ? ranks.map((r) => resample(this.view.store.curve(this.name, r), this.axis, this.range[0], this.range[1], cells, this.weight)) : [];
    this.stats = rows.length ? stats(rows, cells) : null;
    if (this.stats && this.mean) this.band(g, cells);
    for (const rank of ranks) if (this.on.has(rank)) this.line(g, rank);
    if (this.stats && this.mean) this.meanLine(g, cells, ink);
    this.flags(g);
    g.restore();
    this.heat(rows, cells, ratio, ranks);
    this.notes(ranks);
    this.overlay();
    this.drawMs = performance.now() - began;
  }

  axes(g, ink) {
    g.font = "11px system-ui, sans-serif";
    g.lineWidth = 1;
    g.textBaseline = "middle";
    g.textAlign = "right";
    const [a, b] = this.yrange;
    let places = ticks(a, b, 5).map((v) => [v, number(v)]);
    if (this.log) {
      places = [];
      for (let e = Math.floor(a); e <= b; e++) for (const m of b - a > 3 ? [1] : b - a > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]) {
        const v = Math.log10(m) + e;
        if (v >= a && v <= b) places.push([v, number(m * 10 ** e)]);
      }
      if (places.length < 2) places = ticks(a, b, 4).map((v) => [v, number(10 ** v)]);
    }
    for (const [v, text] of places) {
      const y = Math.round(TOP + (1 - (v - a) / (b - a)) * (HEIGHT - TOP - BOTTOM)) + 0.5;
      g.strokeStyle = ink.line;
      g.beginPath();
      g.moveTo(LEFT, y);
      g.lineTo(this.width - RIGHT, y);
      g.stroke();
      g.fillStyle = ink.soft;
      g.fillText(text, LEFT - 7, y);
    }
    g.textAlign = "center";
    const short = this.range[1] - this.range[0] < 20;
    for (const x of ticks(this.range[0], this.range[1], Math.max(2, this.inner / 90))) {
      const text = this.axis === "step" ? number(x) : short ? `${number(x)} s` : duration(x);
      g.fillText(text, Math.min(this.toPx(x), this.width - RIGHT - g.measureText(text).width / 2), HEIGHT - 9);
    }
    g.textAlign = "left";
    g.fillText(this.axis, 8, HEIGHT - 9);
  }

  /** One rank's curve: at most four points in each column of pixels, broken where it is not finite or steps go back. */
  line(g, rank) {
    const curve = this.view.store.curve(this.name, rank);
    const faint = this.weight > 0;
    for (const weight of faint ? [0, this.weight] : [0]) {
      g.globalAlpha = faint && weight === 0 ? 0.22 : 1;
      g.strokeStyle = g.fillStyle = this.colour(rank);
      g.setLineDash(weight === 0 && faint ? [] : this.dash(rank));
      g.lineWidth = 1.6;
      g.lineJoin = "round";
      this.path(g, curve, weight);
    }
    g.globalAlpha = 1;
    g.setLineDash([]);
  }

  path(g, curve, weight) {
    const xs = curve[this.axis], [x0, x1] = this.range, smooth = smoother(weight);
    const k = this.inner / (x1 - x0 || 1);
    let column = NaN, first = 0, last = 0, low = 0, high = 0, px = 0, open = false, before = -Infinity, lone = null;
    const flush = () => {
      if (Number.isNaN(column)) return;
      if (!open) { g.moveTo(px, first); lone = [px, first]; } else { g.lineTo(px, first); lone = null; }
      if (low !== first) { g.lineTo(px, low); lone = null; }
      if (high !== low) g.lineTo(px, high);
      if (last !== high) g.lineTo(px, last);
      open = true;
      column = NaN;
    };
    const lift = () => { flush(); if (lone && open) { g.moveTo(lone[0] - 2, lone[1]); g.lineTo(lone[0] + 2, lone[1]); } open = false; lone = null; };
    g.beginPath();
    for (let i = 0; i < curve.n; i++) {
      const v = smooth(curve.value[i]), x = xs[i];
      if (!Number.isFinite(v) || (this.log && v <= 0)) { lift(); before = x; continue; }
      if (x < before && this.axis === "step") lift();
      before = x;
      // one point beyond each edge, so that the line runs out of the picture
      if ((x < x0 && !(xs[i + 1] >= x0)) || (x > x1 && !(xs[i - 1] <= x1))) { if (x < x0 || open) flush(); continue; }
      const at = LEFT + (x - x0) * k, y = this.toPy(v), c = Math.floor(at);
      if (c !== column) { flush(); column = c; px = at; first = last = low = high = y; } else {
        last = y;
        if (y < low) low = y;
        if (y > high) high = y;
      }
    }
    lift();
    g.stroke();
  }

  band(g, cells) {
    const { low, high } = this.stats;
    g.fillStyle = this.many ? this.colour(0) : this.view.ink.soft;
    g.globalAlpha = this.many ? 0.25 : 0.12;
    for (let a = 0; a < cells; ) {
      if (!this.shown(low[a])) { a++; continue; }
      let b = a;
      while (b < cells && this.shown(low[b])) b++;
      g.beginPath();
      for (let c = a; c < b; c++) g.lineTo(this.cellX(c, cells), this.toPy(high[c]));
      for (let c = b - 1; c >= a; c--) g.lineTo(this.cellX(c, cells), this.toPy(low[c]));
      g.fill();
      a = b;
    }
    g.globalAlpha = 1;
  }

  shown(v) { return Number.isFinite(v) && (!this.log || v > 0); }
  cellX(c, cells) { return LEFT + (c / (cells - 1)) * this.inner; }

  meanLine(g, cells, ink) {
    g.strokeStyle = ink.ink;
    g.lineWidth = this.many ? 1.8 : 1.2;
    g.setLineDash([6, 4]);
    g.beginPath();
    let open = false;
    for (let c = 0; c < cells; c++) {
      const v = this.stats.mean[c];
      if (!this.shown(v)) { open = false; continue; }
      if (open) g.lineTo(this.cellX(c, cells), this.toPy(v));
      else g.moveTo(this.cellX(c, cells), this.toPy(v));
      open = true;
    }
    g.stroke();
    g.setLineDash([]);
  }

  /** A mark on the upper edge where a rank's values stopped being finite. */
  flags(g) {
    for (const [name, rank, step] of this.view.store.state?.bad ?? []) {
      const i = this.view.store.ranks.indexOf(rank);
      if (name !== this.name || this.axis !== "step" || i < 0) continue;
      const x = this.toPx(step);
      g.fillStyle = this.colour(i);
      g.strokeStyle = this.view.ink.paper;
      g.beginPath();
      g.moveTo(x - 6, 1);
      g.lineTo(x + 6, 1);
      g.lineTo(x, 11);
      g.closePath();
      g.fill();
      g.stroke();
    }
  }

  /** Many ranks: each row is a rank, each cell how far it lies from the mean of all ranks there. */
  heat(rows, cells, ratio, ranks) {
    const shown = this.many && rows.length > 1;
    this.stripBox.hidden = this.stripNote.hidden = !shown;
    if (!shown) return;
    const g = size(this.strip, this.width, STRIP, ratio);
    let sum = 0, count = 0;
    for (const row of rows) for (let c = 0; c < cells; c++) {
      const d = row[c] - this.stats.mean[c];
      if (Number.isFinite(d)) { sum += d * d; count++; }
    }
    const far = 3 * Math.sqrt(sum / Math.max(1, count)) || 1e-9;
    const image = new ImageData(cells, rows.length), data = image.data;
    const [cold, hot, none] = [[31, 131, 199], [217, 96, 26], this.view.ink.paperRgb];
    for (let r = 0; r < rows.length; r++) for (let c = 0; c < cells; c++) {
      const d = (rows[r][c] - this.stats.mean[c]) / far, o = 4 * (r * cells + c);
      const to = d < 0 ? cold : hot, f = Number.isFinite(d) ? Math.min(1, Math.abs(d)) : 0;
      for (let k = 0; k < 3; k++) data[o + k] = none[k] + (to[k] - none[k]) * f;
      data[o + 3] = Number.isFinite(d) ? 255 : 0;
    }
    const small = (this.small ??= document.createElement("canvas"));
    small.width = cells;
    small.height = rows.length;
    small.getContext("2d").putImageData(image, 0, 0);
    g.clearRect(0, 0, this.width, STRIP);
    g.imageSmoothingEnabled = false;
    g.drawImage(small, LEFT, 4, this.inner, STRIP - 8);
    g.strokeStyle = this.view.ink.line;
    g.strokeRect(LEFT - 0.5, 3.5, this.inner + 1, STRIP - 7);
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = this.view.ink.soft;
    g.textAlign = "right";
    const each = (STRIP - 8) / rows.length;
    for (let r = 0; r < rows.length; r += Math.ceil(rows.length / 8)) {
      g.fillText(`rank ${this.view.store.ranks[ranks[r]]}`, LEFT - 7, 4 + each * (r + 0.5) + 4);
    }
    this.strip.setAttribute("aria-label", `${this.name} of each rank against the mean of all ranks`);
    say(this.stripNote, `Each row is a rank: blue below the mean of all ranks, orange above it; full colour is ${number(far)} away.`);
  }

  notes(ranks) {
    const curves = ranks.map((r) => this.view.store.curve(this.name, r));
    const every = Math.max(1, ...curves.map((c) => c.every));
    const parts = [];
    if (every > 1) parts.push(`Thinned: smallest and largest of about every ${every} points are drawn.`);
    if (this.log && this.hiddenByLog) parts.push(`${this.hiddenByLog} values at or below 0 have no place on a log axis.`);
    if (curves.some((c) => c.gap)) parts.push("Some points have not arrived yet.");
    if (this.view.store.missed) parts.push(`${this.view.store.missed} messages were lost on the way to this page.`);
    if (ranks.length === 1 && this.view.store.ranks.length > 1) parts.push(`Only rank ${this.view.store.ranks[ranks[0]]} logged ${this.name}.`);
    say(this.note, parts.join(" "));
    const last = this.view.store.state?.columns.last[this.name] ?? [];
    const values = ranks.slice(0, 8).map((r) => `rank ${this.view.store.ranks[r]} ${number(last[r])}`).join(", ");
    this.canvas.setAttribute("aria-label", `Curve of ${this.name ?? "no metric"} over ${this.axis}; last values: ${values}. ` +
      "Arrow keys move the reading line, plus and minus zoom, Escape shows the whole run.");
  }

  /** The reading line, and what every rank had there. */
  overlay() {
    if (!this.range || !this.width || !this.view.ink) return;
    const g = size(this.over, this.width, HEIGHT, window.devicePixelRatio || 1);
    g.clearRect(0, 0, this.width, HEIGHT);
    const ranks = this.ranks();
    const [x0, x1] = this.range;
    if (this.drag) {
      g.fillStyle = this.view.ink.ink;
      g.globalAlpha = 0.12;
      g.fillRect(this.toPx(this.drag[0]), TOP, this.toPx(this.drag[1]) - this.toPx(this.drag[0]), HEIGHT - TOP - BOTTOM);
      g.globalAlpha = 1;
    }
    if (this.at === null || !ranks.length || this.at < x0 || this.at > x1) { this.tip.hidden = true; return; }
    const found = ranks.map((rank) => [rank, ...nearest(this.view.store.curve(this.name, rank), this.axis, this.at)]);
    const x = found.reduce((best, [, at]) => (Math.abs(at - this.at) < Math.abs(best - this.at) ? at : best), found[0][1]);
    const here = found.filter(([, at]) => Math.abs(this.toPx(at) - this.toPx(x)) < 3);
    g.strokeStyle = this.view.ink.soft;
    g.beginPath();
    g.moveTo(this.toPx(x), TOP);
    g.lineTo(this.toPx(x), HEIGHT - BOTTOM);
    g.stroke();
    const row = (colour, label, value) => h("div", {}, h("span", {}, colour ? h("i", { style: { borderColor: colour } }) : "", label), h("b", {}, number(value)));
    const lines = [h("div", {}, this.axis === "step" ? `step ${number(x)}` : `after ${seconds(x)}`)];
    const finite = here.filter(([, , v]) => Number.isFinite(v));
    if (finite.length > 1) lines.push(row(null, `mean of ${finite.length} ranks`, finite.reduce((s, f) => s + f[2], 0) / finite.length));
    const sorted = [...finite].sort((p, q) => p[2] - q[2]);
    const shown = this.many ? here.filter(([r]) => this.on.has(r)).slice(0, 8) : here;
    for (const [rank, , value] of shown) lines.push(row(this.colour(rank), `rank ${this.view.store.ranks[rank]}`, value));
    if (this.many && sorted.length) {
      lines.push(row(null, `smallest, rank ${this.view.store.ranks[sorted[0][0]]}`, sorted[0][2]));
      lines.push(row(null, `largest, rank ${this.view.store.ranks[sorted.at(-1)[0]]}`, sorted.at(-1)[2]));
    }
    for (const [rank, at, value] of finite) {
      if (!this.on.has(rank) || !this.shown(value)) continue;
      g.fillStyle = this.colour(rank);
      g.beginPath();
      g.arc(this.toPx(at), this.toPy(value), 3.5, 0, 7);
      g.fill();
    }
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    const right = this.toPx(x) > this.width / 2;
    this.tip.style.left = right ? "" : `${this.toPx(x) + 12}px`;
    this.tip.style.right = right ? `${this.width - this.toPx(x) + 12}px` : "";
  }
}

/** The [x, value] of a curve that lies nearest; of several alike, the one that came last. */
function nearest(curve, axis, x) {
  const xs = curve[axis];
  let best = 0;
  for (let i = 1; i < curve.n; i++) if (Math.abs(xs[i] - x) <= Math.abs(xs[best] - x)) best = i;
  return [xs[best], curve.value[best]];
}

function stats(rows, cells) {
  const low = new Float32Array(cells).fill(NaN), high = new Float32Array(cells).fill(NaN), mean = new Float32Array(cells).fill(NaN);
  for (let c = 0; c < cells; c++) {
    let a = Infinity, b = -Infinity, sum = 0, n = 0;
    for (const row of rows) {
      const v = row[c];
      if (!Number.isFinite(v)) continue;
      if (v < a) a = v;
      if (v > b) b = v;
      sum += v;
      n++;
    }
    if (n) { low[c] = a; high[c] = b; mean[c] = sum / n; }
  }
  return { low, high, mean };
}

/** A 2d context of this size in CSS pixels, sharp on any screen. */
function size(canvas, width, height, ratio) {
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  return g;
}

// ---------------------------------------------------------------------------------------------- bars, table and text

/** One stacked bar a rank. */
class Bars {
  constructor(title) {
    this.note = h("small");
    this.more = h("div", { class: "nbd-note" });
    this.grid = h("div", { class: "nbd-bars" });
    this.keys = h("div", { class: "nbd-keys" });
    this.node = h("section", { class: "nbd-panel", "aria-label": title, hidden: "" },
      h("h4", { class: "nbd-title" }, title, this.note), this.grid, this.keys, this.more);
  }

  /**
   * @param ranks    global ranks
   * @param parts    [[label, colour, sizes by rank], ...]
   * @param full     what a whole track stands for, by rank
   * @param text     a size as text
   * @param marks    where to put a mark, by rank: a peak
   */
  update(ranks, parts, full, text, totals, marks = []) {
    this.node.hidden = !parts.length;
    const key = `${ranks.join()}|${parts.map((p) => p[0]).join()}`;
    if (key !== this.key) {
      this.key = key;
      this.rows = ranks.map((rank) => {
        const pieces = parts.map(([, colour]) => h("div", { style: { background: colour } }));
        const peak = h("div", { class: "nbd-peak", hidden: "" });
        return { rank, pieces, peak, track: h("div", { class: "nbd-track" }, ...pieces, peak), value: h("span") };
      });
      const every = Math.ceil(ranks.length / 16);
      this.grid.replaceChildren(...this.rows.flatMap((row, i) =>
        [h("span", {}, i % every ? "" : `rank ${row.rank}`), row.track, row.value]));
      this.keys.replaceChildren(...parts.map(([label, colour]) =>
        h("span", { class: "nbd-key" }, h("i", { style: { background: colour } }), label)));
    }
    const every = Math.ceil(ranks.length / 16);
    this.rows.forEach((row, i) => {
      parts.forEach(([, , sizes], k) => { row.pieces[k].style.width = `${(100 * (sizes[i] ?? 0)) / (full[i] || 1)}%`; });
      row.peak.hidden = !known(marks[i]) || !full[i];
      if (!row.peak.hidden) row.peak.style.left = `calc(${Math.min(100, (100 * marks[i]) / full[i])}% - 2px)`;
      const said = `rank ${row.rank}: ${parts.map(([label, , sizes]) => `${label} ${text(sizes[i])}`).join(", ")}` +
        (known(marks[i]) ? `, peak ${text(marks[i])}` : "");
      row.track.title = said;
      row.track.setAttribute("aria-label", said);
      row.track.setAttribute("role", "img");
      say(row.value, i % every ? "" : text(totals[i]));
    });
  }
}

/** One row a rank; a click on a column's head sorts by it. */
class Table {
  constructor() {
    this.head = h("tr");
    this.body = h("tbody");
    this.sort = [0, 1];
    this.node = h("div", { class: "nbd-below nbd-scroll", tabindex: 0, role: "region", "aria-label": "ranks" },
      h("table", {}, h("thead", {}, this.head), this.body));
  }

  update(ranks, state) {
    const c = state.columns;
    const columns = [["rank", ranks, String], ["state", c.state, String], ["step", c.step, number]];
    const add = (label, values, text) => { if (values?.some((v) => v !== null && v !== undefined)) columns.push([label, values, text]); };
    for (const [name, values] of Object.entries(c.last).slice(0, 4)) add(`last ${name}`, values, number);
    add("step time", c.step_s, seconds);
    add("steps/s", c.steps_per_s, number);
    add("samples/s", c.samples_per_s, number);
    add("memory", c.used, bytes);
    add("peak", c.peak, bytes);
    add("load", c.load, (v) => (known(v) ? `${v} %` : "n/a"));
    add("power", c.power, (v) => (known(v) ? `${v} W` : "n/a"));
    add("temp.", c.temperature, (v) => (known(v) ? `${v} °C` : "n/a"));
    const labels = columns.map((col) => col[0]).join("\0");
    if (labels !== this.labels) {
      this.labels = labels;
      this.head.replaceChildren(...columns.map(([label], i) =>
        h("th", { scope: "col" }, h("button", { type: "button", onclick: () => {
          this.sort = [i, this.sort[0] === i ? -this.sort[1] : 1];
          this.update(...this.latest);
        } }, label))));
    }
    this.latest = [ranks, state];
    [...this.head.children].forEach((th, i) =>
      th.setAttribute("aria-sort", i !== this.sort[0] ? "none" : this.sort[1] > 0 ? "ascending" : "descending"));
    const [by, way] = this.sort[0] < columns.length ? this.sort : [0, 1];
    const order = ranks.map((_, i) => i).sort((p, q) => {
      const a = columns[by][1][p], b = columns[by][1][q];
      return way * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    });
    while (this.body.children.length < ranks.length) this.body.append(h("tr"));
    order.forEach((i, place) => {
      const tr = this.body.children[place];
      while (tr.children.length < columns.length) tr.append(h("td"));
      while (tr.children.length > columns.length) tr.lastChild.remove();
      columns.forEach(([label, values, text], k) => {
        const bad = (label === "state" && /fail|died|kill|error/.test(values[i])) || typeof values[i] === "string" && label.startsWith("last ");
        say(tr.children[k], values[i] === null || values[i] === undefined ? "n/a" : text(values[i]));
        tr.children[k].dataset.level = bad ? "bad" : "";
      });
    });
  }
}

/** The end of what each rank has printed, one rank at a time. */
class Text {
  constructor() {
    this.tabs = h("span");
    this.pre = h("pre", { tabindex: 0, "aria-label": "output of one rank" });
    this.rank = null;
    this.node = h("section", { class: "nbd-below nbd-text", hidden: "" },
      h("div", { class: "nbd-tools" }, h("h4", { class: "nbd-title" }, "output by rank"), this.tabs), this.pre);
  }

  update(store) {
    const ranks = [...store.text.keys()].sort((a, b) => a - b);
    this.node.hidden = !ranks.length;
    if (!ranks.length) return;
    if (this.rank === null) this.rank = ranks[0];
    if (ranks.join() !== this.key) {
      this.key = ranks.join();
      const pick = (rank) => { this.rank = Number(rank); this.update(store); };
      this.tabs.replaceChildren(ranks.length <= 8
        ? choice("rank", ranks.map((r) => [r, `rank ${r}`]), this.rank, pick)
        : h("select", { "aria-label": "rank", onchange: (e) => pick(e.target.value) }, ...ranks.map((r) => h("option", { value: r }, `rank ${r}`))));
    }
    const below = this.pre.scrollHeight - this.pre.scrollTop - this.pre.clientHeight < 4;
    say(this.pre, (store.text.get(this.rank) ?? "").replace(/\x1b\[[0-9;?]*[ -/]*[@-~]/g, ""));
    if (below) this.pre.scrollTop = this.pre.scrollHeight;
  }
}

// -------------------------------------------------------------------------------------------------------------- view

/** Ask the notebook's server to interrupt the kernel: a message to the busy kernel itself would wait for the cell. */
async function interrupt(path) {
  const config = pageConfig();
  const headers = {};
  if (config.token) headers.Authorization = `token ${config.token}`;
  const xsrf = document.cookie.match(/(?:^|; )_xsrf=([^;]*)/);
  if (xsrf) headers["X-XSRFToken"] = decodeURIComponent(xsrf[1]);
  const base = config.baseUrl.endsWith("/") ? config.baseUrl : `${config.baseUrl}/`;
  const reply = await fetch(base + path, { method: "POST", credentials: "same-origin", headers });
  if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
}

/** What JupyterLab and Notebook tell a page about their server; null elsewhere (VS Code, Colab). */
function pageConfig() {
  const node = document.getElementById("jupyter-config-data");
  try {
    const config = JSON.parse(node.textContent);
    return typeof config.baseUrl === "string" ? config : null;
  } catch {
    return null;
  }
}

class View {
  constructor(model, el) {
    this.model = model;
    this.meta = model.get("meta");
    this.store = storeOf(model);
    this.build(el);
    this.stopListening = new AbortController();
    const listener = () => this.schedule();
    this.store.listeners.add(listener);
    const sizes = new ResizeObserver(listener);
    sizes.observe(this.root);
    // An output scrolled out of sight is not drawn, and drawn at once when it comes back.
    const sight = new IntersectionObserver((entries) => { this.visible = entries.at(-1).isIntersecting; listener(); });
    sight.observe(this.root);
    const theme = new MutationObserver(() => { this.ink = null; listener(); });
    theme.observe(document.body, { attributes: true, attributeFilter: ["class", "data-jp-theme-name", "data-jp-theme-light"] });
    const clock = setInterval(listener, 1000);
    this.close = () => {
      this.store.listeners.delete(listener);
      for (const observer of [sizes, sight, theme]) observer.disconnect();
      clearInterval(clock);
      cancelAnimationFrame(this.frame);
    };
    this.schedule();
  }

  build(el) {
    const meta = this.meta;
    this.status = h("span", { class: "nbd-status", role: "status" });
    this.facts = h("span", { class: "nbd-facts", title: meta.facts }, meta.facts);
    this.button = h("button", { class: "nbd-button", type: "button", hidden: "", onclick: () => this.press() });
    this.fill = h("div");
    this.bar = h("div", { class: "nbd-progress", role: "progressbar", "aria-label": "progress", "aria-valuemin": 0, "aria-valuemax": 100 }, this.fill);
    this.tiles = h("div", { class: "nbd-stats" });
    this.findings = h("ul", { class: "nbd-findings", "aria-live": "polite" });
    this.plot = new Plot(this);
    this.memory = new Bars("memory");
    this.time = new Bars("step time");
    this.side = h("div", { class: "nbd-side" }, this.memory.node, this.time.node);
    this.table = new Table();
    this.text = new Text();
    this.root = h("div", { class: "nbd", role: "group", "aria-label": `dashboard of ${meta.run}` },
      h("div", { class: "nbd-head" }, h("span", { class: "nbd-name" }, meta.run), this.status, this.facts, this.button),
      this.bar, this.tiles, this.findings,
      h("div", { class: "nbd-body" }, this.plot.node, this.side), this.table.node, this.text.node);
    this.root.dashboard = this; // for whoever looks at the numbers behind the picture
    el.append(this.root);
    this.ink = null; // read at the first drawing: until the element is in the page it has no colours
    this.visible = true;
  }

  readInk() {
    const style = getComputedStyle(this.root);
    const probe = document.createElement("canvas").getContext("2d");
    const paper = style.backgroundColor;
    probe.fillStyle = paper;
    probe.fillRect(0, 0, 1, 1);
    return {
      ink: style.color, paper, paperRgb: [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3),
      soft: style.getPropertyValue("--nbd-soft").trim(), line: style.getPropertyValue("--nbd-line").trim(),
    };
  }

  schedule() {
    if (this.frame || !this.visible) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  draw() {
    const { store } = this;
    if (!this.root.isConnected) return;
    this.ink ??= this.readInk();
    this.root.toggleAttribute("data-many", store.ranks.length > this.meta.many);
    this.plot.draw();
    this.clock();
    if (store.state && store.state !== this.drawn) {
      this.drawn = store.state;
      this.panels(store.state);
    }
    this.text.update(store);
  }

  /** What moves by itself: elapsed and left. */
  clock() {
    const { store, meta } = this, state = store.state;
    const running = !state || state.status === "running";
    const since = running ? (performance.now() - store.heardAt) / 1000 : 0;
    const tiles = [["elapsed", duration(state?.elapsed_s ?? store.elapsed + since)]];
    if (state) {
      const left = state.progress?.left_s;
      if (running && known(left)) tiles.push([`left, ${state.progress.name}`, duration(left - since)]);
      const c = state.columns;
      const steps = c.step.filter(known);
      if (steps.length) tiles.push(["step", Math.min(...steps) === Math.max(...steps) ? number(steps[0]) : `${Math.min(...steps)} to ${Math.max(...steps)}`]);
      const [first] = Object.keys(c.last);
      if (first) {
        const values = c.last[first].filter((v) => v !== null);
        const finite = values.filter(known);
        const who = values.length === 1 ? `rank ${store.ranks[c.last[first].findIndex((v) => v !== null)]}` : `mean of ${finite.length} ranks`;
        tiles.push([`${first}, ${who}`, finite.length ? number(finite.reduce((a, b) => a + b, 0) / finite.length) : String(values[0])]);
      }
      const rates = c.steps_per_s.filter(known), samples = c.samples_per_s.filter(known);
      if (rates.length) tiles.push(["steps/s", number(Math.min(...rates))]);
      if (samples.length) tiles.push([`samples/s, ${samples.length > 1 ? "all ranks" : "1 rank"}`, number(samples.reduce((a, b) => a + b, 0))]);
    }
    const key = tiles.map((t) => t[0]).join("\0");
    if (key !== this.tilesKey) {
      this.tilesKey = key;
      this.tiles.replaceChildren(...tiles.map(([label]) => h("div", { class: "nbd-stat" }, h("span", {}, label), h("b"))));
    }
    tiles.forEach(([, value], i) => say(this.tiles.children[i].lastChild, value));
    const status = state?.status ?? "running";
    this.status.dataset.status = status;
    say(this.status, { ok: "finished", error: "failed" }[status] ?? status);
    const stop = running ? (meta.stop === "endpoint" ? pageConfig() && meta.interrupt_path : meta.stop) : meta.keep;
    this.button.hidden = !stop;
    this.button.classList.toggle("nbd-stop", running);
    if (!this.pressed || !running) say(this.button, running ? "Stop" : "Keep as figure");
  }

  panels(state) {
    const { store, meta } = this, c = state.columns;
    const going = state.progress;
    const part = going && going.total ? Math.min(1, going.done / going.total) : state.status === "ok" ? 1 : 0;
    this.bar.hidden = !going?.total;
    this.fill.style.width = `${100 * part}%`;
    this.bar.setAttribute("aria-valuenow", String(Math.round(100 * part)));
    if (going) this.bar.title = `${going.name}: ${going.done} of ${going.total ?? "?"}`;
    const said = JSON.stringify(state.findings);
    if (said !== this.said) {
      this.said = said;
      this.findings.replaceChildren(...state.findings.map(([level, text]) => h("li", { "data-level": level }, text)));
    }
    const memory = Object.entries(c.memory).map(([label, sizes]) => [label, meta.memory_colours[label] ?? "#8b929c", sizes]);
    const limits = c.limit.filter(known);
    const held = store.ranks.map((_, i) => memory.reduce((sum, part) => sum + (part[2][i] ?? 0), 0));
    const most = Math.max(...held, 1);
    this.memory.update(store.ranks, memory, held.map((_, i) => c.limit[i] ?? most), bytes, held, limits.length ? c.peak : []);
    say(this.memory.note, limits.length ? `of ${bytes(Math.max(...limits))}` : "process" in c.memory ? "of each process" : "held for the model");
    say(this.memory.more, state.memory_note ?? "");
    const parts = Object.entries(meta.parts).filter(([key]) => c.parts[key])
      .map(([key, label]) => [label, meta.part_colours[key], c.parts[key]]);
    const sums = store.ranks.map((_, i) => parts.reduce((sum, p) => sum + (p[2][i] ?? 0), 0));
    const longest = Math.max(...sums, 1e-9);
    this.time.update(store.ranks, parts, sums.map(() => longest), seconds, sums);
    say(this.time.note, parts.length ? "mean of the last steps" : "");
    this.side.hidden = this.memory.node.hidden && this.time.node.hidden;
    this.root.toggleAttribute("data-plain", this.side.hidden);
    this.table.update(store.ranks, state);
  }

  async press() {
    const running = (this.store.state?.status ?? "running") === "running";
    this.button.disabled = true;
    try {
      if (!running) this.model.send({ type: "keep" });
      else if (this.meta.stop === "message") this.model.send({ type: "stop" });
      else await interrupt(this.meta.interrupt_path);
      say(this.button, running ? "Stopping ..." : "Keeping ...");
      this.pressed = true;
    } catch (error) {
      say(this.button, "Stop");
      this.button.title = `Stop did not work (${error.message}): use the notebook's own interrupt`;
    }
    // A second press is the next rung: it ends what did not stop.
    setTimeout(() => { this.button.disabled = false; this.pressed = false; this.schedule(); }, 3000);
  }
}

export default {
  // Before any view is drawn: no message may be missed.
  initialize({ model }) {
    const store = storeOf(model);
    model.on("msg:custom", (content, buffers) => store.receive(content, buffers || []));
    model.send({ type: "ready" });
    return () => stores.delete(model.get("meta").id);
  },
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};

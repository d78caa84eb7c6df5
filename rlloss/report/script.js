(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const minus = (text) => text.replace("-", "\u2212");
  const write = (value, percent) =>
    value === null ? "not finite" : minus(percent ? (100 * value).toFixed(2) + " %" : String(+value.toPrecision(5)));

  const show = (text, event) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
    const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - 12 - box.height : event.clientY + 16;
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
  };
  const hide = () => { tip.hidden = true; };

  // The place of the pointer in the units of a picture.
  const inside = (svg, event) => {
    const box = svg.getBoundingClientRect();
    const view = svg.viewBox.baseVal;
    return [((event.clientX - box.left) / box.width) * view.width, ((event.clientY - box.top) / box.height) * view.height];
  };

  const nearest = (steps, step) => {
    let low = 0;
    let high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const svg = figure.querySelector("svg");
    const cursor = svg.querySelector(".cursor");
    const [left, right] = [44, 350];
    const [first, last] = data.span;
    svg.addEventListener("pointermove", (event) => {
      const share = (inside(svg, event)[0] - left) / (right - left);
      const steps = data.series[0].x.length >= 1 ? data.series.map((s) => s.x[nearest(s.x, first + share * (last - first))]) : [];
      const step = steps.reduce((a, b) =>
        Math.abs(b - first - share * (last - first)) < Math.abs(a - first - share * (last - first)) ? b : a);
      const x = left + (right - left) * (last > first ? (step - first) / (last - first) : 0.5);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      const lines = data.series
        .map((s) => [s.name, s.x[nearest(s.x, step)], s.y[nearest(s.x, step)]])
        .filter((found) => found[1] === step)
        .map((found) => found[0] + "  " + write(found[2], data.percent));
      show("step " + step + "\n" + lines.join("\n"), event);
    });
    svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; hide(); });
  }

  const bin = (low, high, name) => {
    const text = (v) => minus(String(+(name === "log_ratio" ? Math.exp(v) : v).toPrecision(3)));
    const what = name === "log_ratio" ? "ratio " : "advantage ";
    if (low === null) return what + "below " + text(high);
    return high === null ? what + "above " + text(low) : what + text(low) + " to " + text(high);
  };

  for (const figure of document.querySelectorAll("figure.heat")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const svg = figure.querySelector("svg");
    const spot = svg.querySelector(".spot");
    const [left, top, width, height] = data.box;
    const rows = data.edges.length - 1;
    svg.addEventListener("pointermove", (event) => {
      const [x, y] = inside(svg, event);
      const column = Math.floor(((x - left) / width) * data.cols.length);
      const row = rows - 1 - Math.floor(((y - top) / height) * rows);
      if (column < 0 || column >= data.cols.length || row < 0 || row >= rows) {
        spot.style.visibility = "hidden";
        return hide();
      }
      const [a, b, total, counts] = data.cols[column];
      spot.setAttribute("x", left + (column * width) / data.cols.length);
      spot.setAttribute("y", top + ((rows - 1 - row) * height) / rows);
      spot.setAttribute("width", width / data.cols.length);
      spot.setAttribute("height", height / rows);
      spot.style.visibility = "visible";
      const share = total ? ((100 * counts[row]) / total).toFixed(2) : "0";
      const when = a === b ? "step " + a : "steps " + a + " to " + b;
      show(when + "\n" + bin(data.edges[row], data.edges[row + 1], data.name) + "\n" +
        counts[row].toLocaleString("en") + " tokens, " + share + " %", event);
    });
    svg.addEventListener("pointerleave", () => { spot.style.visibility = "hidden"; hide(); });
  }

  document.addEventListener("pointerover", (event) => {
    const token = event.target.closest ? event.target.closest(".t") : null;
    if (!token) {
      if (!(event.target.closest && event.target.closest("svg"))) hide();
      return;
    }
    const r = token.dataset.r;
    const lines = r === "" ? ["log-ratio not finite"] : [
      "log-ratio  " + minus((+r > 0 ? "+" : "") + (+r).toFixed(4)), "ratio  " + Math.exp(+r).toFixed(4)];
    if (token.dataset.a !== "") lines.push("advantage  " + minus(String(+token.dataset.a)));
    show(lines.join("\n"), event);
  });

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();

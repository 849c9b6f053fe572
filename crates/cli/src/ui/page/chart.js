// Line charts in SVG: logarithmic axes, bands, legend, readout, table for screen readers.
import { h, s, say, put, num, size } from './util.js';

const PALETTE = 8;
const DASHES = ['', '6 3', '2 3', '8 3 2 3', '', '6 3', '2 3', '8 3 2 3'];

const decades = (low, high) => {
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) ticks.push(10 ** e);
  return ticks;
};
const binaryTicks = (low, high, room) => {
  const a = Math.log2(low), b = Math.log2(high), ticks = [];
  const step = [1, 2, 3, 5, 10].find(n => (b - a) / n <= room) || 10;
  for (let e = Math.ceil(a); e <= b + 1e-9; e += 1) if (e % step === 0) ticks.push(2 ** e);
  return ticks;
};
const plain = value => value >= 1e4 ? `${Number((value / 1e3).toPrecision(3))}k` : String(Number(value.toPrecision(3)));

/**
 * Draws into `host`. spec: {title, y: {label, unit, format}, series: [{name, points: [[x, y, low, high]],
 * kind: 'direct'|'staged'|…, color: 0..7, dash, marks}], mark: x, xLabel}.
 */
export function chart(host, spec) {
  const plot = h('div', { className: 'plot' });
  const readout = h('div', { className: `readout${spec.series.length > 3 ? ' many' : ''}` });
  put(host, h('figure', { className: 'chart' }, h('figcaption', {}, h('strong', {}, spec.title), ' ',
    h('span', { className: 'muted' }, spec.y.label)), plot, readout, table(spec)));
  const draw = () => drawPlot(plot, readout, spec, Math.max(260, plot.clientWidth || 560));
  draw();
  let last = plot.clientWidth;
  const observer = new ResizeObserver(() => {
    if (!plot.isConnected) { observer.disconnect(); return; }
    if (plot.clientWidth && plot.clientWidth !== last) { last = plot.clientWidth; draw(); }
  });
  observer.observe(plot);
}

const lineClass = (line, i) => `line ${line.kind ? `k-${line.kind}` : `c${(line.color ?? i) % PALETTE}`}`;
const dashOf = (line, i) => line.dash ?? (line.kind ? (line.kind === 'staged' ? '7 4' : '') : DASHES[(line.color ?? i) % PALETTE]);

function swatch(line, i) {
  return s('svg', { width: 28, height: 10, viewBox: '0 0 28 10', 'aria-hidden': 'true' },
    s('line', { class: lineClass(line, i), x1: 1, x2: 27, y1: 5, y2: 5, 'stroke-dasharray': dashOf(line, i) || null }),
    line.marks && s('circle', { class: `${lineClass(line, i)} dot`, cx: 14, cy: 5, r: 3 }));
}

function table(spec) {
  const xs = [...new Set(spec.series.flatMap(l => l.points.map(p => p[0])))].sort((a, b) => a - b);
  const at = spec.series.map(l => new Map(l.points.map(p => [p[0], p])));
  const cell = p => !p ? '' : p[2] !== undefined ? `${num(p[1])} (${num(p[2])} to ${num(p[3])})` : num(p[1]);
  const details = h('details', { className: 'data' }, h('summary', {}, 'Table'));
  details.append(h('div', { className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': `${spec.title}, table` },
    h('table', {}, h('caption', { className: 'visually-hidden' }, `${spec.title}, ${spec.y.label}`),
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Message size'),
        spec.series.map(l => h('th', { scope: 'col' }, l.name)))),
      h('tbody', {}, xs.map(x => h('tr', {}, h('th', { scope: 'row' }, size(x)),
        at.map(map => h('td', {}, cell(map.get(x))))))))));
  return details;
}

function drawPlot(plot, readout, spec, width) {
  const height = Math.round(Math.min(320, Math.max(220, width * 0.5)));
  const m = { left: 46, right: 26, top: 10, bottom: 34 };
  const all = spec.series.flatMap(l => l.points).filter(p => p[0] > 0 && p[1] > 0);
  if (!all.length) { put(plot, h('p', { className: 'empty' }, 'No data for this choice.')); put(readout); return; }
  const xs = all.map(p => p[0]), ys = all.flatMap(p => [p[1], p[2] > 0 ? p[2] : p[1], p[3] > 0 ? p[3] : p[1]]);
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 * 2);
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  const pad = Math.max(1.15, (y1 / y0) ** 0.06);
  y0 /= pad; y1 *= pad;
  const X = v => m.left + (Math.log(v / x0) / Math.log(x1 / x0)) * (width - m.left - m.right);
  const Y = v => height - m.bottom - (Math.log(v / y0) / Math.log(y1 / y0)) * (height - m.top - m.bottom);
  let yTicks = decades(y0, y1).filter(t => t >= y0 && t <= y1);
  if (yTicks.length < 3) {
    yTicks = decades(y0, y1).flatMap(t => [t, 2 * t, 5 * t]).filter(t => t >= y0 && t <= y1);
  }
  const parts = [];
  for (const t of yTicks) {
    parts.push(s('line', { class: 'grid', x1: m.left, x2: width - m.right, y1: Y(t), y2: Y(t) }),
      s('text', { class: 'tick', x: m.left - 6, y: Y(t) + 4, 'text-anchor': 'end' }, plain(t)));
  }
  for (const t of binaryTicks(x0, x1, (width - m.left) / 62)) {
    parts.push(s('line', { class: 'grid faint', x1: X(t), x2: X(t), y1: m.top, y2: height - m.bottom }),
      s('text', { class: 'tick', x: X(t), y: height - m.bottom + 15, 'text-anchor': 'middle' }, size(t)));
  }
  parts.push(s('line', { class: 'axis', x1: m.left, x2: width - m.right, y1: height - m.bottom, y2: height - m.bottom }),
    s('text', { class: 'tick', x: (m.left + width - m.right) / 2, y: height - 4, 'text-anchor': 'middle' }, spec.xLabel || 'message size'));
  if (spec.mark && spec.mark >= x0 && spec.mark <= x1) {
    parts.push(s('line', { class: 'mark', x1: X(spec.mark), x2: X(spec.mark), y1: m.top, y2: height - m.bottom }));
  }
  spec.series.forEach((line, i) => {
    const points = line.points.filter(p => p[0] > 0 && p[1] > 0);
    if (!points.length) return;
    if (points[0][2] > 0) {
      const high = points.map(p => `${X(p[0])},${Y(p[3])}`), low = [...points].reverse().map(p => `${X(p[0])},${Y(p[2])}`);
      parts.push(s('polygon', { class: `band ${line.kind ? `k-${line.kind}` : `c${(line.color ?? i) % PALETTE}`}`, points: [...high, ...low].join(' ') }));
    }
    parts.push(s('polyline', { class: lineClass(line, i), 'stroke-dasharray': dashOf(line, i) || null, points: points.map(p => `${X(p[0])},${Y(p[1])}`).join(' ') }));
    if (line.marks) for (const p of points) parts.push(s('circle', { class: `${lineClass(line, i)} dot`, cx: X(p[0]), cy: Y(p[1]), r: 3 }));
  });
  const cursor = s('line', { class: 'cursor', y1: m.top, y2: height - m.bottom, x1: -9, x2: -9 });
  const dots = s('g', {});
  const root = s('svg', { class: 'chart-svg', width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img',
    'aria-label': `${spec.title}. Left and right arrow keys read the values. A table follows.` }, parts, cursor, dots);
  put(plot, root);
  const grid = [...new Set(all.map(p => p[0]))].sort((a, b) => a - b);
  let at = spec.mark ? nearest(grid, spec.mark) : grid.length - 1;
  const show = (live, byKey) => {
    const x = grid[at], rows = [];
    put(dots);
    spec.series.forEach((line, i) => {
      const p = line.points.find(q => q[0] === x);
      const known = p && p[1] > 0;
      rows.push(h('div', { className: 'value' }, swatch(line, i), h('span', { className: 'series' }, line.name), h('b', {}, known ? spec.y.format(p[1]) : '-'),
        h('span', { className: 'muted range' }, known && p[2] > 0 ? `${num(p[2])} to ${num(p[3])}` : '')));
      if (known && live) dots.append(s('circle', { class: `${lineClass(line, i)} dot`, cx: X(x), cy: Y(p[1]), r: 4 }));
    });
    cursor.setAttribute('x1', live ? X(x) : -9); cursor.setAttribute('x2', live ? X(x) : -9);
    put(readout, h('p', { className: 'at' }, 'At ', h('b', {}, size(x))), h('div', { className: 'values' }, rows));
    if (byKey) say([size(x), ...rows.map(r => r.textContent)].join(', '));
  };
  show(false);
  root.addEventListener('pointermove', event => {
    const box = root.getBoundingClientRect();
    const px = (event.clientX - box.left) * width / box.width;
    const value = x0 * Math.exp((px - m.left) / (width - m.left - m.right) * Math.log(x1 / x0));
    at = nearest(grid, value);
    show(true);
  });
  root.addEventListener('pointerleave', () => { at = spec.mark ? nearest(grid, spec.mark) : grid.length - 1; show(false); });
  root.addEventListener('keydown', event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(grid.length - 1, Math.max(0, at + step));
    show(true, true);
  });
}

const nearest = (grid, value) => {
  let best = 0;
  grid.forEach((x, i) => { if (Math.abs(Math.log(x / value)) < Math.abs(Math.log(grid[best] / value))) best = i; });
  return best;
};

/** A sparkline: two areas, direct and staged, of the last values. */
export function sparkline(values, length, label) {
  const w = 240, hgt = 44, top = Math.max(1, ...values.map(v => v.total));
  const X = i => (length - values.length + i) / (length - 1) * w, Y = v => hgt - 1 - v / top * (hgt - 6);
  const area = key => values.length < 2 || !values.some(v => v[key] > 0) ? null : s('polygon', { class: `spark ${key}`,
    points: [`${X(0)},${hgt}`, ...values.map((v, i) => `${X(i)},${Y(v[key])}`), `${w},${hgt}`].join(' ') });
  return s('svg', { class: 'sparkline', viewBox: `0 0 ${w} ${hgt}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label },
    s('line', { class: 'axis', x1: 0, x2: w, y1: hgt - 0.5, y2: hgt - 0.5 }), area('total'), area('staged'));
}

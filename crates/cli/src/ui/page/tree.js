// The PCI tree: model from `topo --json`, layout for the width at hand, path of the bytes.
import { fact } from './util.js';

const DEVICE = new Set(['gpu', 'nic', 'nvme']);
const ORDER = { nic: 0, nvme: 1, gpu: 2 };
const BOX = 36, GAP = 7, HEAD = 36;

const devicesBelow = branch => DEVICE.has(branch.kind) ? [branch] : branch.children.flatMap(devicesBelow);

/** Items of a lane: devices, and switches below the first one, in drawing order. */
function itemsBelow(branch, depth = 0) {
  const items = [];
  for (const child of branch.children) {
    if (DEVICE.has(child.kind)) items.push({ branch: child, depth });
    else if (child.kind === 'switch') {
      items.push({ branch: child, depth, below: itemsBelow(child, depth + 1) });
    } else items.push(...itemsBelow(child, depth));
  }
  const order = item => item.below ? 3 : ORDER[item.branch.kind];
  return items.sort((a, b) => order(a) - order(b));
}

function lanesOf(node) {
  const lanes = [];
  for (const root of node.children) {
    const loose = { ...root, children: [] };
    const walk = (branch, port) => {
      for (const child of branch.children) {
        if (child.kind === 'switch') {
          if (devicesBelow(child).length) lanes.push({ head: child, port, items: itemsBelow(child) });
        } else if (DEVICE.has(child.kind)) loose.children.push(child);
        else walk(child, child.kind === 'root-port' ? child : port);
      }
    };
    walk(root, null);
    if (loose.children.length) lanes.push({ head: loose, port: null, items: itemsBelow(loose) });
  }
  return lanes;
}

/** GPUs whose NVLinks all lead to a switch, or to every other GPU (4 of them): by name, since no file tells what a link leads to. */
const MESH = /A100-SXM|A800-SXM|H100 80GB HBM3|H100 SXM|H800(?! PCIe)|H20\b|H200(?! NVL)|B[123]00\b/;

/**
 * The GPUs with NVLink: the set of them, and the same set as `joined` where each reaches every other. Otherwise
 * (bridged pairs, cube meshes) which ones are joined is unknown, and nothing is drawn. `links`: of each GPU.
 */
export function nvlinkOf(gpus) {
  const of = gpu => { const links = gpu.nvlinks; return typeof links === 'number' ? links : 0; };
  const some = gpus.filter(gpu => of(gpu) > 0), links = Math.max(0, ...some.map(of));
  const linked = new Set(some.map(gpu => gpu.address));
  const full = some.length === 2 || some.length > 2 && some.every(gpu => of(gpu) === links && MESH.test(fact(gpu.name) || ''));
  return { linked, links, joined: full ? linked : null };
}

/** Groups the tree by NUMA node and by switch (or root bus). */
export function treeModel(topo) {
  return topo.nodes.map((node, index) => ({ node, index, lanes: lanesOf(node) }));
}

const flat = items => items.flatMap(item => [item, ...(item.below ? flat(item.below) : [])]);

/** Positions for a drawing of the given width: boxes by id, NVLink bars (of a set of GPUs, or null), socket links, height. */
export function layout(model, width, nvlink) {
  const out = { nvlink, boxes: new Map(), numa: [], bars: [], stubs: [], sockets: [], height: 0, narrow: false };
  const columns = lane => lane.items.some(i => i.below) ? 1 : Math.max(1, Math.ceil(lane.items.length / 6));
  const wide = model.map(m => m.lanes.reduce((sum, lane) => sum + columns(lane), 0) || 1);
  const total = wide.reduce((a, b) => a + b, 0);
  const socketGap = 30;
  const fits = (cols, groups) => (width - (groups - 1) * socketGap - groups * 16) / cols - 10;
  const least = 98;
  if (fits(total, model.length) >= least) {
    const column = Math.min(170, fits(total, model.length));
    let x = 0;
    const used = model.reduce((sum, m, i) => sum + Math.max(wide[i] * (column + 10) + 6, 240), 0) + (model.length - 1) * socketGap;
    if (used < width) x = (width - used) / 2;
    for (const [i, m] of model.entries()) {
      const w = Math.max(wide[i] * (column + 10) + 6, 240);
      wideNode(out, m, x, 0, w, column, columns, nvlink);
      x += w + socketGap;
    }
    const bottom = Math.max(...out.numa.map(n => n.y + n.h));
    for (const n of out.numa) { n.h = bottom - n.y; moveBar(out, n); }
    sideBySide(out, nvlink);
  } else if (Math.max(...wide) && fits(Math.max(...wide), 1) >= least) {
    let y = 0;
    for (const [i, m] of model.entries()) {
      const column = Math.min(170, fits(wide[i], 1) - 2);
      wideNode(out, m, 0, y, width - 12, column, columns, nvlink);
      y = out.numa.at(-1).y + out.numa.at(-1).h + 26;
    }
    stacked(out, width, nvlink);
  } else {
    out.narrow = true;
    let y = 0;
    for (const m of model) {
      narrowNode(out, m, y, width - 12, nvlink);
      y = out.numa.at(-1).y + out.numa.at(-1).h + 26;
    }
    stacked(out, width, nvlink);
  }
  out.height = Math.max(...out.numa.map(n => n.y + n.h), 60) + 2;
  return out;
}

function addBox(out, id, kind, x, y, w, h, extra) {
  const box = { id, kind, x, y, w, h, cx: x + w / 2, cy: y + h / 2, ...extra };
  out.boxes.set(id, box);
  return box;
}

function header(out, m, x, y, w) {
  const memW = Math.min(128, Math.max(112, w * 0.3));
  const cpu = addBox(out, `cpu${m.index}`, 'cpu', x + 8, y + 28, w - memW - 16 - 22, HEAD, { node: m.node, index: m.index });
  const mem = addBox(out, `mem${m.index}`, 'memory', x + w - memW - 8, y + 28, memW, HEAD, { node: m.node, index: m.index });
  cpu.memory = mem.id;
  return cpu;
}

function wideNode(out, m, x, y, w, column, columns, nvlink) {
  const numa = { index: m.index, x, y, w, h: 0, label: m.node.label };
  out.numa.push(numa);
  const cpu = header(out, m, x, y, w);
  const bus = cpu.y + cpu.h + 12;
  const headY = bus + 20;
  let laneX = x + 8, bottom = headY;
  for (const lane of m.lanes) {
    const cols = columns(lane);
    const laneW = cols * column + (cols - 1) * 10;
    const head = addBox(out, lane.head.address, lane.head.kind, laneX, headY, laneW, HEAD,
      { branch: lane.head, port: lane.port, parent: cpu.id, numaIndex: m.index });
    const rise = Math.min(Math.max(head.cx, cpu.x + 14), cpu.x + cpu.w - 14);
    head.conn = [[head.cx, head.y], [head.cx, bus], [rise, bus], [rise, cpu.y + cpu.h]];
    const per = cols > 1 ? Math.ceil(lane.items.length / cols) : Infinity;
    if (cols > 1) {
      lane.items.forEach((item, i) => {
        const c = Math.floor(i / per), r = i % per;
        const last = placeItems(out, [item], laneX + c * (column + 10), headY + HEAD + GAP + r * (BOX + GAP), column, head, nvlink, m.index);
        bottom = Math.max(bottom, last);
      });
    } else bottom = Math.max(bottom, placeItems(out, lane.items, laneX, headY + HEAD + GAP, column, head, nvlink, m.index));
    laneX += laneW + 10;
  }
  numa.h = bottom - y + 6;
  if (nvlink && gpusOf(out, m.index).length) {
    out.bars.push({ index: m.index, x: x + 8, y: bottom + 10, w: w - 16, h: 20 });
    numa.h += 32;
  }
}

function placeItems(out, items, x, y, w, parent, nvlink, numaIndex) {
  const rail = x + 6;
  for (const item of items) {
    const inner = x + 17, right = nvlink ? 9 : 0;
    const tall = item.below ? 26 : BOX;
    const box = addBox(out, item.branch.address, item.branch.kind, inner, y, w - 17 - right, tall,
      { branch: item.branch, parent: parent.id, numaIndex });
    box.conn = [[inner, box.cy], [rail, box.cy], [rail, parent.y + parent.h]];
    box.nvlinkX = x + w - 4;
    y += tall + GAP;
    if (item.below) y = placeItems(out, item.below, x + 12, y, w - 12, box, nvlink, numaIndex);
  }
  return y;
}

function narrowNode(out, m, y, w, nvlink) {
  const numa = { index: m.index, x: 0, y, w, h: 0, label: m.node.label };
  out.numa.push(numa);
  const cpu = header(out, m, 0, y, w);
  const trunk = 14, headX = 26, headW = 74;
  const right = nvlink ? 14 : 8;
  const area = w - headX - headW - 10 - right;
  const perRow = Math.max(2, Math.floor(area / 118));
  const cell = (area - (perRow - 1) * 6) / perRow;
  let at = cpu.y + cpu.h + 12;
  for (const lane of m.lanes) {
    const devices = flat(lane.items).filter(i => !i.below).map(i => i.branch);
    const rows = narrowRows(devices, perRow);
    const laneH = rows.length * (BOX + 14);
    const head = addBox(out, lane.head.address, lane.head.kind, headX, at, headW, laneH,
      { branch: lane.head, port: lane.port, parent: cpu.id, numaIndex: m.index });
    head.conn = [[headX, head.cy], [trunk, head.cy], [trunk, cpu.y + cpu.h]];
    rows.forEach((row, r) => row.forEach((branch, c) => {
      if (!branch) return;
      const x = headX + headW + 10 + c * (cell + 6), top = at + r * (BOX + 14) + 12;
      const box = addBox(out, branch.address, branch.kind, x, top, cell, BOX, { branch, parent: head.id, numaIndex: m.index });
      box.conn = [[box.cx, top], [box.cx, top - 9], [head.x + head.w, top - 9]];
      box.nvlinkX = w - 7;
    }));
    at += laneH + 10;
  }
  numa.h = at - y + 2;
  if (nvlink && gpusOf(out, m.index).length) {
    out.bars.push({ index: m.index, x: 8, y: at, w: w - 16, h: 20 });
    numa.h += 28;
  }
}

/** GPUs at the right end of the rows, so that NVLink reaches them. */
function narrowRows(devices, perRow) {
  const gpus = devices.filter(d => d.kind === 'gpu'), rest = devices.filter(d => d.kind !== 'gpu');
  const rows = [];
  while (gpus.length || rest.length) {
    const row = new Array(perRow).fill(null);
    if (gpus.length) row[perRow - 1] = gpus.shift();
    for (let c = 0; c < perRow; c += 1) if (!row[c] && rest.length) row[c] = rest.shift();
    rows.push(row);
  }
  return rows;
}

/** The GPUs of a NUMA node that NVLink joins. */
const gpusOf = (out, index) => [...out.boxes.values()].filter(b => b.numaIndex === index && out.nvlink.has(b.id));
const moveBar = (out, numa) => {
  const bar = out.bars.find(b => b.index === numa.index);
  if (bar) bar.y = numa.y + numa.h - 28;
};

function stubs(out) {
  for (const bar of out.bars) {
    for (const gpu of gpusOf(out, bar.index)) {
      out.stubs.push([[gpu.x + gpu.w, gpu.cy], [gpu.nvlinkX, gpu.cy], [gpu.nvlinkX, bar.y]]);
    }
  }
}
/** Links every NUMA node to every other, along one line beside the boxes. */
function sockets(out, route) {
  const cpus = out.numa.map(n => out.boxes.get(`cpu${n.index}`));
  cpus.forEach((a, from) => cpus.slice(from + 1).forEach((b, i) => out.sockets.push({ from, to: from + 1 + i, points: route(a, b) })));
}
function sideBySide(out, nvlink) {
  // The link leaves the processor, not its memory: above the boxes.
  sockets(out, (a, b) => {
    const y = a.y - 7, x = a.x + a.w - 16;
    return [[x, a.y], [x, y], [b.x + 16, y], [b.x + 16, b.y]];
  });
  if (nvlink) {
    stubs(out);
    for (let i = 1; i < out.bars.length; i += 1) {
      const a = out.bars[i - 1], b = out.bars[i];
      out.stubs.push([[a.x + a.w, a.y + 10], [b.x, b.y + 10]]);
    }
  }
}
function stacked(out, width, nvlink) {
  sockets(out, (a, b) => [[a.x, a.cy], [4, a.cy], [4, b.cy], [b.x, b.cy]]);
  if (nvlink) {
    stubs(out);
    for (let i = 1; i < out.bars.length; i += 1) {
      const a = out.bars[i - 1], b = out.bars[i];
      out.stubs.push([[a.x + a.w, a.y + 10], [width - 4, a.y + 10], [width - 4, b.y + 10], [b.x + b.w, b.y + 10]]);
    }
  }
}

/** The way through a box from one edge point to another. */
function through(box, a, b) {
  const sideways = p => Math.abs(p[0] - box.x) < 1 || Math.abs(p[0] - box.x - box.w) < 1;
  if (sideways(a) && sideways(b)) return [[box.cx, a[1]], [box.cx, b[1]]];
  if (sideways(a)) return [[b[0], a[1]]];
  if (sideways(b)) return [[a[0], b[1]]];
  return [[a[0], box.cy], [b[0], box.cy]];
}

/** Points from a device up to the given ancestor, without the turn inside it. */
function climb(out, id, top) {
  const points = [], hubs = [];
  let box = out.boxes.get(id);
  while (box && box.id !== top) {
    if (!box.conn) break;
    if (points.length) points.push(...through(box, points.at(-1), box.conn[0]));
    points.push(...box.conn);
    hubs.push(box.parent);
    box = out.boxes.get(box.parent);
  }
  return { points, hubs };
}
const ancestors = (out, id) => {
  const list = [];
  for (let box = out.boxes.get(id); box; box = out.boxes.get(box.parent)) list.push(box.id);
  return list;
};

/**
 * Path of the bytes from a GPU to an adapter.
 * staged: through host memory of the GPU's NUMA node. viaCpu: redirected to the processor (ACS).
 * Answers the polylines and the boxes they pass.
 */
export function bytePath(out, gpu, nic, staged, viaCpu) {
  const a = out.boxes.get(gpu), b = out.boxes.get(nic);
  if (!a || !b) return { legs: [], hubs: [] };
  const cpuA = out.boxes.get(`cpu${a.numaIndex}`), cpuB = out.boxes.get(`cpu${b.numaIndex}`);
  const above = new Set(ancestors(out, nic));
  let apex = ancestors(out, gpu).find(id => above.has(id));
  if (staged || viaCpu || !apex) apex = null;
  const up = climb(out, gpu, apex || cpuA.id), down = climb(out, nic, apex || cpuB.id);
  const shift = ([x, y]) => [x + 5, y + (out.narrow ? 4 : 5)];
  const back = down.points.map(shift).reverse();
  const tip = down.points[0];
  back[back.length - 1] = Math.abs(tip[0] - b.x) < 1 ? [tip[0], tip[1] + 5] : [tip[0] + 5, tip[1]];
  const start = up.points.at(-1), end = back[0];
  const hubs = [...new Set([...up.hubs, ...down.hubs])];
  if (apex) {
    return { legs: [[...up.points, ...through(out.boxes.get(apex), start, end), ...back]], hubs };
  }
  const cross = cpuA === cpuB ? null : out.sockets.find(l => l.from === Math.min(a.numaIndex, b.numaIndex) && l.to === Math.max(a.numaIndex, b.numaIndex));
  const socket = cross && (a.numaIndex < b.numaIndex ? cross.points : [...cross.points].reverse());
  const over = (from, to) => socket
    ? [...through(cpuA, from, socket[0]), ...socket, ...through(cpuB, socket.at(-1), to)]
    : through(cpuA, from, to);
  if (!staged) return { legs: [[...up.points, ...over(start, end), ...back]], hubs };
  const mem = out.boxes.get(cpuA.memory);
  const door = [cpuA.x + cpuA.w, cpuA.cy - 5], back0 = [cpuA.x + cpuA.w, cpuA.cy + 8];
  const leg1 = [...up.points, ...through(cpuA, start, door), door, [mem.x, mem.cy - 5]];
  const leg2 = [[mem.x, mem.cy + 8], back0, ...over(back0, end), ...back];
  return { legs: [leg1, leg2], hubs: [...hubs, mem.id] };
}

// Draws every chart of the page from the cells of its table, so that both show the same numbers.
"use strict";
(() => {
  const COLOURS = 8;
  const NARROW = 560;
  const [DARK_INK, LIGHT_INK] = ["#0e141d", "#ffffff"];

  // ---- tables

  function readTable(id) {
    const table = document.getElementById(id);
    const columns = {};
    const names = [...table.tHead.rows[0].cells].map((cell) => {
      columns[cell.dataset.c] = { title: cell.textContent, unit: cell.dataset.u };
      return cell.dataset.c;
    });
    const rows = [...table.tBodies[0].rows].map((row) => {
      const cells = {};
      names.forEach((name, at) => {
        const cell = row.cells[at];
        cells[name] = { value: cell.dataset.v === undefined ? null : Number(cell.dataset.v), text: cell.textContent };
      });
      return cells;
    });
    return { columns, rows, element: table };
  }

  // ---- numbers on axes

  function si(value) {
    const steps = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [size, letter] = steps.find(([least]) => Math.abs(value) >= least) || [1, ""];
    return `${Number((value / size).toPrecision(3))}${letter}`;
  }

  function prefixed(value, unit) {
    const text = si(value);
    const letter = /[A-Za-z]$/.test(text) ? text.slice(-1) : "";
    return `${letter ? text.slice(0, -1) : text} ${letter}${unit}`;
  }

  function span(value) {
    if (value === 0) return "0 s";
    if (value >= 3600) return `${Math.floor(value / 3600)}:${two(Math.floor(value / 60) % 60)}:${two(value % 60)} h`;
    if (value >= 120) return `${Math.floor(value / 60)}:${two(value % 60)} min`;
    const [size, name] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    return `${Number((value / size).toPrecision(3))} ${name}`;
  }

  function two(value) {
    const text = `${Math.round(value * 100) / 100}`;
    return value < 10 ? `0${text}` : text;
  }

  function onAxis(unit) {
    if (unit === "s") return span;
    if (unit === "0…1") return (value) => `${Number((value * 100).toPrecision(3))}%`;
    return si;
  }

  // ---- what all charts have in common

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    return {
      font: getComputedStyle(document.body).fontFamily, text: read("text"), muted: read("muted"), line: read("line"), card: read("card"), bad: read("bad"),
      colours: Array.from({ length: COLOURS }, (_, at) => read(`c${at}`)),
    };
  }

  // The relative luminance of a colour #rrggbb, as WCAG 2 defines it.
  function luminance(colour) {
    const [red, green, blue] = [1, 3, 5].map((at) => {
      const part = parseInt(colour.slice(at, at + 2), 16) / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }

  // The text colour with the higher contrast on a coloured area. Dark mode has pale areas, light mode mostly dark ones.
  function inkOn(colour) {
    const contrast = (ink) => {
      const [lower, higher] = [luminance(ink), luminance(colour)].sort((one, other) => one - other);
      return (higher + 0.05) / (lower + 0.05);
    };
    return contrast(DARK_INK) > contrast(LIGHT_INK) ? DARK_INK : LIGHT_INK;
  }

  // An element and no markup: no name in it can be more than text.
  function tip(title, lines) {
    const box = document.createElement("div");
    box.className = "tip";
    box.append(Object.assign(document.createElement("b"), { textContent: title }));
    for (const [colour, name, text] of lines) {
      const line = document.createElement("div");
      const left = document.createElement("span");
      if (colour) {
        const mark = document.createElement("i");
        mark.style.background = colour;
        left.append(mark);
      }
      left.append(name);
      line.append(left, Object.assign(document.createElement("span"), { textContent: text }));
      box.append(line);
    }
    return box;
  }

  function common(look) {
    return {
      animation: false,
      color: look.colours,
      textStyle: { color: look.text, fontFamily: look.font },
      tooltip: {
        backgroundColor: look.card, borderColor: look.line, textStyle: { color: look.text }, confine: true,
        transitionDuration: 0,
      },
    };
  }

  function axis(look, more) {
    return {
      axisLine: { lineStyle: { color: look.line } },
      axisTick: { show: false },
      axisLabel: { color: look.muted, hideOverlap: true, ...more.axisLabel },
      splitLine: { lineStyle: { color: look.line } },
      nameTextStyle: { color: look.muted },
      ...Object.fromEntries(Object.entries(more).filter(([name]) => name !== "axisLabel")),
    };
  }

  function legend(look, names) {
    return {
      show: names.length > 1, data: names, top: 0, left: 0, right: 60, type: "scroll", icon: "roundRect",
      itemWidth: 12, itemHeight: 12, textStyle: { color: look.text }, pageTextStyle: { color: look.muted },
    };
  }

  const COUNTED = ["rows", "requests", "sequences", "steps", "tokens"];

  // Of what is counted there are no halves.
  function whole(unit) {
    return COUNTED.includes(unit) ? 1 : null;
  }

  function rowLines(table, row, columns, colours) {
    return columns.map((name, at) => [colours[at], table.columns[name].title, row[name].text]);
  }

  // ---- the kinds of charts

  const kinds = {};

  // Values that hold from the end of the row before to the row's own; a band lies between a least and a most.
  kinds.lines = (table, chart, look, width) => {
    const first = table.rows[0];
    const points = (name) => [
      [first[chart.from].value, first[name].value],
      ...table.rows.map((row) => [row[chart.x].value, row[name].value]),
    ];
    const series = chart.lines.flatMap((line, at) => {
      const colour = look.colours[at];
      const drawn = {
        type: "line", name: table.columns[line.y].title, data: points(line.y), step: "start", symbol: "none",
        lineStyle: { width: 1.6, color: colour }, itemStyle: { color: colour }, emphasis: { disabled: true },
      };
      if (line.stack) Object.assign(drawn, { stack: "all", areaStyle: { opacity: 0.28 } });
      return line.band ? [...bandOf(line.band, points, colour), drawn] : [drawn];
    });
    const shown = Object.keys(table.columns).filter((name) => name !== chart.from && name !== chart.x);
    const colours = shown.map((name) => {
      const at = chart.lines.findIndex((line) => line.y === name);
      return at < 0 ? null : look.colours[at];
    });
    return {
      ...common(look),
      legend: legend(look, chart.lines.map((line) => table.columns[line.y].title)),
      grid: { top: 44, left: 12, right: 20, bottom: 40, containLabel: true },
      xAxis: axis(look, {
        type: "value", min: first[chart.from].value, max: table.rows[table.rows.length - 1][chart.x].value,
        axisLabel: { formatter: span, showMaxLabel: false }, splitLine: { show: false }, splitNumber: width < NARROW ? 3 : 6,
      }),
      yAxis: axis(look, {
        type: "value", min: 0, minInterval: whole(chart.unit), max: chart.unit === "0…1" ? 1 : null, axisLabel: { formatter: onAxis(chart.unit) },
        name: chart.unit === "0…1" ? "" : chart.unit, nameLocation: "end", nameTextStyle: { color: look.muted, align: "left" },
        nameGap: 8,
      }),
      dataZoom: [
        { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false, preventDefaultMouseMove: false, filterMode: "none" },
        {
          type: "slider", height: 18, bottom: 8, filterMode: "none", brushSelect: false, showDataShadow: false,
          borderColor: look.line, textStyle: { color: look.muted }, labelFormatter: span,
          fillerColor: "rgba(120,150,200,.18)", handleSize: "110%",
        },
      ],
      toolbox: {
        show: width >= NARROW, right: 0, top: -4, itemSize: 14, iconStyle: { borderColor: look.muted },
        feature: { dataZoom: { yAxisIndex: "none", filterMode: "none", title: { zoom: "Zoom", back: "Back" } }, restore: { title: "Whole run" } },
      },
      tooltip: {
        ...common(look).tooltip, trigger: "axis",
        axisPointer: { type: "line", snap: false, lineStyle: { color: look.muted } },
        formatter: (found) => {
          const at = found[0].axisValue;
          const row = table.rows.find((one) => one[chart.x].value >= at) || table.rows[table.rows.length - 1];
          return tip(`${row[chart.from].text} to ${row[chart.x].text}`, rowLines(table, row, shown, colours));
        },
      },
      series,
    };
  };

  function bandOf([least, most], points, colour) {
    const low = points(least);
    const high = points(most).map(([x, value], at) => [x, value - low[at][1]]);
    const shape = {
      type: "line", step: "start", symbol: "none", stack: "band", silent: true, lineStyle: { opacity: 0 },
      tooltip: { show: false }, emphasis: { disabled: true },
    };
    return [
      { ...shape, name: "least", data: low },
      { ...shape, name: "most", data: high, areaStyle: { color: colour, opacity: 0.22 } },
    ];
  }

  kinds.bars = (table, chart, look, width) => {
    const names = table.rows.map((row) => row[chart.category].text);
    const format = onAxis(chart.unit);
    const labelled = chart.horizontal && !chart.stacked;
    const series = chart.bars.map((name) => ({
      type: "bar", name: table.columns[name].title, data: table.rows.map((row) => row[name].value),
      stack: chart.stacked ? "all" : null, barMaxWidth: chart.histogram ? null : 34,
      barCategoryGap: chart.histogram ? "6%" : "30%", emphasis: { disabled: true },
      label: { show: labelled, position: "right", color: look.text, formatter: (bar) => table.rows[bar.dataIndex][name].text },
    }));
    if (chart.baseline !== undefined) {
      series[0].markLine = {
        silent: true, symbol: "none", label: { show: false }, lineStyle: { color: look.muted, type: "dashed" },
        data: [{ xAxis: chart.baseline }],
      };
    }
    const categories = axis(look, {
      type: "category", data: names, inverse: Boolean(chart.horizontal), splitLine: { show: false },
      axisLabel: chart.horizontal ? { width: Math.min(180, width * 0.34), overflow: "truncate", hideOverlap: false } : {},
    });
    const values = axis(look, {
      type: "value", min: 0, minInterval: whole(chart.unit), axisLabel: { formatter: format }, name: chart.horizontal || chart.unit === "0…1" || chart.unit === "s" ? "" : chart.unit,
      nameTextStyle: { color: look.muted, align: "left" }, nameGap: 10, splitNumber: width < NARROW ? 3 : 5,
      max: chart.baseline === undefined ? null : (found) => Math.ceil(Math.max(found.max, chart.baseline) * 5 + 0.5) / 5,
    });
    const several = series.length > 1;
    return {
      ...common(look),
      legend: legend(look, series.map((one) => one.name)),
      grid: { top: several ? 40 : chart.horizontal ? 8 : 28, left: 14, right: labelled ? 72 : 20, bottom: 4, containLabel: true },
      xAxis: chart.horizontal ? values : categories,
      yAxis: chart.horizontal ? categories : values,
      tooltip: {
        ...common(look).tooltip, trigger: "axis", axisPointer: { type: "shadow" },
        formatter: (found) => rowTip(table, table.rows[found[0].dataIndex], chart.category, chart.bars, look),
      },
      series,
    };
  };

  function rowTip(table, row, category, drawn, look) {
    const shown = Object.keys(table.columns).filter((name) => name !== category && row[name].value !== null);
    const colours = shown.map((name) => (drawn.includes(name) ? look.colours[drawn.indexOf(name)] : null));
    return tip(row[category].text, rowLines(table, row, shown, colours));
  }

  // A bar for each whole, made of its parts; the table's rows get the colours, and so it is the legend.
  kinds.split = (table, chart, look, width) => {
    const wholes = [...new Set(table.rows.map((row) => row[chart.level].text))];
    const series = [];
    let [least, most] = [0, 1];
    wholes.forEach((whole, at) => {
      const parts = table.rows.filter((row) => row[chart.level].text === whole);
      const shares = parts.map((row) => row[chart.share].value || 0);
      least = Math.min(least, shares.filter((share) => share < 0).reduce((sum, share) => sum + share, 0));
      most = Math.max(most, shares.filter((share) => share > 0).reduce((sum, share) => sum + share, 0));
      parts.forEach((row, number) => {
        const share = shares[number];
        const colour = look.colours[number % COLOURS];
        const text = row[chart.part].text;
        swatch(table, row, chart.part, colour);
        series.push({
          type: "bar", stack: "all", name: `${whole} ${text}`, barWidth: 44, itemStyle: { color: colour, borderColor: look.card, borderWidth: 1 },
          emphasis: { disabled: true }, data: wholes.map((_, place) => (place === at ? share : null)),
          label: { show: share * width * 0.85 > text.length * 7.5 + 8, color: inkOn(colour), formatter: () => text },
          tooltip: { formatter: () => tip(`${text} (${whole})`, rowLines(table, row, [chart.value, chart.share], [colour, null])) },
        });
      });
    });
    return {
      ...common(look),
      grid: { top: 8, left: 14, right: 20, bottom: 4, containLabel: true },
      xAxis: axis(look, { type: "value", min: least, max: most, axisLabel: { formatter: onAxis("0…1"), showMinLabel: least === 0, showMaxLabel: most === 1 }, splitNumber: 4 }),
      yAxis: axis(look, { type: "category", data: wholes, inverse: true, axisLine: { show: false }, splitLine: { show: false } }),
      tooltip: { ...common(look).tooltip, trigger: "item" },
      series,
    };
  };

  // A lane for each process, with a block for each stretch of time; the table's rows get the colours, and so it is the
  // legend. Colours tell apart what one process does.
  kinds.lanes = (table, chart, look, width) => {
    const lanes = [...new Set(table.rows.map((row) => row[chart.lane].text))];
    const series = lanes.map((lane, at) => {
      const own = table.rows.filter((row) => row[chart.lane].text === lane);
      const parts = [...new Set(own.map((row) => row[chart.part].text))];
      const colours = own.map((row) => look.colours[parts.indexOf(row[chart.part].text) % COLOURS]);
      own.forEach((row, number) => swatch(table, row, chart.part, colours[number]));
      return {
        type: "custom", name: lane, encode: { x: [1, 2], y: 0 },
        data: own.map((row) => [at, row[chart.from].value, row[chart.until].value]),
        renderItem: (params, api) => block(params, api, own[params.dataIndex][chart.part].text, colours[params.dataIndex]),
        tooltip: { formatter: (found) => laneTip(table, own[found.dataIndex], chart, colours[found.dataIndex]) },
      };
    });
    const most = Math.max(...table.rows.map((row) => row[chart.until].value));
    return {
      ...common(look),
      grid: { top: 8, left: 14, right: 20, bottom: 4, containLabel: true },
      xAxis: axis(look, { type: "value", min: 0, max: most, axisLabel: { formatter: span, showMaxLabel: false }, splitNumber: width < NARROW ? 3 : 6 }),
      yAxis: axis(look, { type: "category", data: lanes, inverse: true, axisLine: { show: false }, splitLine: { show: false } }),
      tooltip: { ...common(look).tooltip, trigger: "item" },
      series,
    };
  };

  function block(params, api, text, colour) {
    const [left, right] = [api.coord([api.value(1), api.value(0)]), api.coord([api.value(2), api.value(0)])];
    const height = Math.min(28, api.size([0, 1])[1] * 0.7);
    const shape = { x: left[0], y: left[1] - height / 2, width: Math.max(1, right[0] - left[0]), height };
    const children = [{ type: "rect", shape, style: { fill: colour } }];
    if (shape.width > text.length * 7.5 + 8) {
      const style = { text, x: shape.x + shape.width / 2, y: left[1], fill: inkOn(colour), align: "center", verticalAlign: "middle" };
      children.push({ type: "text", style });
    }
    return { type: "group", children };
  }

  function laneTip(table, row, chart, colour) {
    const shown = [chart.from, chart.until];
    return tip(`${row[chart.part].text} (${row[chart.lane].text})`, rowLines(table, row, shown, [colour, null]));
  }

  function swatch(table, row, part, colour) {
    const cell = table.element.tBodies[0].rows[table.rows.indexOf(row)].cells[Object.keys(table.columns).indexOf(part)];
    let mark = cell.querySelector("i");
    if (!mark) {
      mark = document.createElement("i");
      mark.className = "swatch";
      cell.prepend(mark);
    }
    mark.style.background = colour;
  }

  kinds.curves = (table, chart, look, width) => {
    const drawn = chart.lines.map((line) => line.y).filter((name) => table.rows.some((row) => row[name].value > 0));
    return {
      ...common(look),
      legend: legend(look, drawn.map((name) => table.columns[name].title)),
      grid: { top: 44, left: 12, right: 28, bottom: 8, containLabel: true },
      xAxis: axis(look, { type: "category", data: table.rows.map((row) => row[chart.category].text), splitLine: { show: false }, boundaryGap: false, axisLabel: { alignMinLabel: "left", alignMaxLabel: "right" } }),
      yAxis: axis(look, {
        type: chart.log ? "log" : "value", min: chart.zero ? 0 : null, axisLabel: { formatter: onAxis(chart.unit) },
        name: chart.unit === "s" ? "" : chart.unit, nameTextStyle: { color: look.muted, align: "left" }, nameGap: 10,
        splitNumber: width < NARROW ? 3 : 5,
      }),
      tooltip: {
        ...common(look).tooltip, trigger: "axis",
        formatter: (found) => rowTip(table, table.rows[found[0].dataIndex], chart.category, drawn, look),
      },
      series: drawn.map((name) => ({
        type: "line", name: table.columns[name].title, symbolSize: 6, connectNulls: true, emphasis: { disabled: true },
        data: table.rows.map((row) => (chart.log && !(row[name].value > 0) ? null : row[name].value)),
      })),
    };
  };

  kinds.roofline = (table, chart, look, width) => {
    const groups = [...new Set(table.rows.map((row) => row[chart.by].text))];
    const ridge = chart.peak_flops && chart.peak_bytes ? chart.peak_flops / chart.peak_bytes : null;
    const xs = table.rows.map((row) => row[chart.x].value).concat(ridge ? [ridge] : []);
    const ys = table.rows.map((row) => row[chart.y].value).concat(chart.peak_flops ? [chart.peak_flops] : []);
    const decade = (value, round) => 10 ** round(Math.log10(value));
    const [left, right] = [decade(Math.min(...xs), Math.floor), decade(Math.max(...xs) * 1.2, Math.ceil)];
    const largest = width < NARROW ? 32 : 46;
    const series = groups.map((group, at) => ({
      type: "scatter", name: group, itemStyle: { color: look.colours[at], opacity: 0.72, borderColor: look.card, borderWidth: 1 },
      emphasis: { disabled: true },
      data: table.rows.filter((row) => row[chart.by].text === group).map((row) => ({
        value: [row[chart.x].value, row[chart.y].value], row,
        symbolSize: Math.max(6, largest * Math.sqrt(row[chart.size].value)),
      })),
    }));
    if (ridge) series.push(roofOf(chart, look, left, ridge, right));
    const shown = Object.keys(table.columns).filter((name) => name !== chart.by);
    return {
      ...common(look),
      legend: legend(look, groups),
      grid: { top: 48, left: 12, right: 20, bottom: 26, containLabel: true },
      xAxis: axis(look, {
        type: "log", min: left, max: right, axisLabel: { formatter: si }, name: "FLOP/byte", nameLocation: "middle", nameGap: 26,
        minorTick: { show: true, splitNumber: 9 }, minorSplitLine: { show: true, lineStyle: { color: look.line, opacity: 0.4 } },
      }),
      yAxis: axis(look, {
        type: "log", min: decade(Math.min(...ys), Math.floor), max: decade(Math.max(...ys) * 1.2, Math.ceil), axisLabel: { formatter: si },
        minorTick: { show: true, splitNumber: 9 }, minorSplitLine: { show: true, lineStyle: { color: look.line, opacity: 0.4 } }, name: "FLOP/s",
        nameTextStyle: { color: look.muted, align: "left" }, nameGap: 10,
      }),
      tooltip: {
        ...common(look).tooltip, trigger: "item",
        formatter: (found) => {
          const row = found.data.row;
          return row ? tip(`${row[chart.by].text} steps`, rowLines(table, row, shown, [])) : tip("roof of the hardware", []);
        },
      },
      series,
    };
  };

  // Boxes in boxes. What a prefix saved by itself is a box of its own beside those that begin with it.
  kinds.tree = (table, chart, look, width) => {
    const nodes = new Map(table.rows.map((row) => [row[chart.node].text, { row, children: [] }]));
    const roots = [];
    for (const node of nodes.values()) {
      const above = nodes.get(node.row[chart.parent].text);
      (above ? above.children : roots).push(node);
    }
    const box = ({ row, children }, depth) => {
      const name = row.users.value === null ? row[chart.node].text : `${row.depth.text} tokens × ${row.users.text}`;
      const colour = look.colours[depth % COLOURS];
      const own = { name, value: row[chart.value].value, row, itemStyle: { color: colour }, label: { color: inkOn(colour) } };
      if (!children.length) return own;
      const inside = children.map((child) => box(child, depth + 1));
      if (own.value > 0) inside.unshift(own);
      return { name, row, children: inside, itemStyle: { borderColor: look.line } };
    };
    return {
      ...common(look),
      tooltip: {
        ...common(look).tooltip,
        formatter: (found) => {
          const row = found.data && found.data.row;
          if (!row) return tip("all shared prefixes", []);
          const shown = Object.keys(table.columns).filter((name) => name !== chart.node && row[name].value !== null);
          return tip(row.users.value === null ? row[chart.node].text : `prefix ${row[chart.node].text}`, rowLines(table, row, shown, []));
        },
      },
      series: [{
        type: "treemap", name: "all", animation: false, animationDuration: 0, animationDurationUpdate: 0, data: roots.map((root) => box(root, 0)), left: 0, right: 0, top: 4, bottom: 4,
        roam: false, nodeClick: false, breadcrumb: { show: false }, visibleMin: width < NARROW ? 200 : 60,
        childrenVisibleMin: 400, emphasis: { disabled: true },
        label: { show: true },
        upperLabel: { show: true, height: 22, color: look.text, fontSize: 12 },
        itemStyle: { borderWidth: 2, gapWidth: 2, borderColor: look.card },
        levels: [{ itemStyle: { borderWidth: 0, gapWidth: 3 }, upperLabel: { show: false } }],
      }],
    };
  };

  function roofOf(chart, look, left, ridge, right) {
    return {
      type: "line", name: "roof", symbol: "none", z: 1, lineStyle: { color: look.bad, width: 2 }, silent: true,
      data: [[left, left * chart.peak_bytes], [ridge, chart.peak_flops], [right, chart.peak_flops]],
      markPoint: {
        symbol: "circle", symbolSize: 1, silent: true, itemStyle: { color: look.bad },
        data: [{ coord: [ridge, chart.peak_flops] }],
        label: {
          show: true, position: "top", color: look.bad, fontWeight: 600,
          formatter: () => `${prefixed(chart.peak_flops, "FLOP/s")}, ${prefixed(chart.peak_bytes, "B/s")}`,
        },
      },
    };
  }

  // ---- drawing, and drawing again when the width or the colours change

  const drawn = new Map();

  function heightOf(chart, table) {
    if (chart.kind === "split") return 60 + 62 * new Set(table.rows.map((row) => row[chart.level].text)).size;
    if (chart.kind === "lanes") return 40 + 44 * new Set(table.rows.map((row) => row[chart.lane].text)).size;
    if (chart.kind === "bars" && chart.horizontal) {
      return 70 + table.rows.length * Math.max(38, chart.stacked ? 0 : 22 * chart.bars.length);
    }
    return null;
  }

  function draw(figure) {
    const chart = JSON.parse(figure.dataset.chart);
    const table = readTable(figure.dataset.table);
    const height = heightOf(chart, table);
    if (height) figure.style.height = `${height}px`;
    const instance = echarts.init(figure, null, { renderer: "svg" });
    const build = () => instance.setOption(kinds[chart.kind](table, chart, theme(), figure.clientWidth));
    build();
    if (chart.group) {
      instance.group = chart.group;
      echarts.connect(chart.group);
      if (matchMedia("(pointer: fine)").matches) {
        instance.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
      }
    }
    drawn.set(figure, { instance, build, width: figure.clientWidth });
  }

  function resized(figure) {
    const one = drawn.get(figure);
    if (!one || one.width === figure.clientWidth) return;
    one.width = figure.clientWidth;
    one.instance.resize();
    one.build();
  }

  const figures = [...document.querySelectorAll("figure.chart")];
  figures.forEach(draw);
  const watcher = new ResizeObserver((entries) => entries.forEach((entry) => resized(entry.target)));
  figures.forEach((figure) => watcher.observe(figure));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { instance, build } of drawn.values()) {
      instance.clear();
      build();
    }
  });
})();

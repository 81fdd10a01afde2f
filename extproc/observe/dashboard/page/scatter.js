// Scatter plot of predicted against actual seconds: one point per request, both axes logarithmic.

export function draw(canvas, points, [low, middle, high]) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name);
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const ticks = scale(points.flatMap(([predicted, actual]) => [predicted, actual]).filter((value) => value > 0));
  const [least, most] = [ticks[0], ticks.at(-1)];
  const [left, right, top, bottom] = [52, 18, 10, 40];
  const part = (value) => Math.log(value / least) / Math.log(most / least);
  const x = (value) => left + part(value) * (width - left - right);
  const y = (value) => height - bottom - part(value) * (height - top - bottom);

  pen.lineWidth = 1;
  pen.strokeStyle = colour("--line");
  pen.fillStyle = colour("--quiet");
  for (const value of ticks) {
    pen.beginPath();
    pen.moveTo(x(value), y(least));
    pen.lineTo(x(value), y(most));
    pen.moveTo(x(least), y(value));
    pen.lineTo(x(most), y(value));
    pen.stroke();
    pen.textAlign = "center";
    pen.fillText(`${value} s`, x(value), height - bottom + 16);
    pen.textAlign = "right";
    pen.fillText(`${value} s`, left - 6, Math.max(y(value), 10) + 4);
  }
  pen.textAlign = "center";
  pen.fillText("predicted →", (left + width - right) / 2, height - 8);
  pen.save();
  pen.translate(10, (height - bottom) / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText("actual →", 0, 0);
  pen.restore();

  pen.save();
  pen.beginPath();
  pen.rect(left, top, width - left - right, height - top - bottom);
  pen.clip();
  pen.fillStyle = colour("--band");
  pen.beginPath();
  pen.moveTo(x(least), y(least * low));
  pen.lineTo(x(most), y(most * low));
  pen.lineTo(x(most), y(most * high));
  pen.lineTo(x(least), y(least * high));
  pen.fill();
  line(pen, [x(least), y(least * middle)], [x(most), y(most * middle)], colour("--accent"), []);
  line(pen, [x(least), y(least)], [x(most), y(most)], colour("--quiet"), [5, 4]);
  pen.fillStyle = colour("--accent");
  pen.globalAlpha = 0.65;
  for (const [predicted, actual] of points) {
    if (!(predicted > 0 && actual > 0)) continue;
    pen.beginPath();
    pen.arc(x(predicted), y(actual), 2.5, 0, 2 * Math.PI);
    pen.fill();
  }
  pen.restore();
}

/** Ticks 1, 2, 5, 10 …, from just below the least value to above the greatest. */
function scale(values) {
  const steps = [];
  for (let power = -3; power < 5; power++) for (const digit of [1, 2, 5]) steps.push(Number(`${digit}e${power}`));
  const first = steps.findLastIndex((step) => step <= Math.min(...values));
  const last = steps.findIndex((step) => step > 1.1 * Math.max(...values));
  return steps.slice(Math.max(first, 0), Math.max(last, first + 2, 2) + 1);
}

function line(pen, from, to, colour, dashes) {
  pen.strokeStyle = colour;
  pen.setLineDash(dashes);
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
  pen.setLineDash([]);
}

// A recording as the viewer shows it: pieces and captions on one time axis, in seconds.
//
// piece: { at, length, who, text, heard, mark, error, clips, pictures, videos, timing }
//   who: "listen" | "speak" (a unit of a duplex session), "you" | "assistant" (half a turn)
//   clips, pictures, videos: paths of assets; mark: "interrupted" | "dropped" | ""
//   error: slug of what ended it early, or ""
// caption: { from, until, who: "you" | "assistant", text }

const UNIT_S = 1;
const SILENT_TURN_S = 2;

// recording: the content of recording.json.
export function readRecording(recording) {
  const isDuplex = recording.mode === "duplex";
  const pieces = isDuplex ? piecesOfUnits(recording.chunks ?? []) : piecesOfTurns(recording.turns ?? []);
  let end = 0;
  pieces.forEach((piece, i) => {
    // Units say where they are in the replay, if there is one.
    piece.at ??= end;
    end = pieces[i + 1]?.at ?? piece.at + piece.length;
    piece.length = end - piece.at;
  });
  return {
    isDuplex,
    pieces,
    length: end,
    replay: recording.merged_replay ?? null,
    video: recording.merged_replay_video ?? null,
  };
}

function piecesOfUnits(chunks) {
  return chunks.map((chunk) => {
    const { result = {} } = chunk;
    return {
      at: chunk.replay_ms === undefined ? null : chunk.replay_ms / 1000,
      length: Math.max(UNIT_S, (result.ai_audio_duration_ms ?? 0) / 1000),
      who: result.mode === "SPEAK" ? "speak" : "listen",
      text: result.text ?? "",
      heard: result.heard ?? "",
      mark: ["interrupted", "dropped"].find((flag) => result[flag]) ?? "",
      error: chunk.error ?? "",
      clips: [chunk.user_audio, result.ai_audio].filter(Boolean),
      pictures: [chunk.user_frame ?? []].flat(),
      videos: [],
      timing: result.timing?.wall_clock_ms ?? null,
      hasUserAudio: Boolean(chunk.user_audio),
      hasVoice: Boolean(result.ai_audio),
      endsTurn: Boolean(result.end_of_turn),
    };
  });
}

function piecesOfTurns(turns) {
  return turns.flatMap(({ input = {}, output = {}, timing = {}, error }) => [
    {
      ...half(input.audios ?? input.audio, input.duration_ms, "you", input.text ?? ""),
      pictures: [input.images ?? []].flat(),
      videos: [input.videos ?? []].flat(),
      hasUserAudio: Boolean(input.audio),
      hasVoice: false,
    },
    {
      ...half(output.audio, output.audio_duration_ms, "assistant", output.text ?? ""),
      timing: timing.elapsed_ms ?? null,
      error: error ?? "",
      hasUserAudio: false,
      hasVoice: Boolean(output.audio),
    },
  ]);
}

function half(audio, ms, who, text) {
  return {
    at: null,
    length: ms ? ms / 1000 : SILENT_TURN_S,
    who,
    text,
    heard: "",
    mark: "",
    error: "",
    clips: [audio ?? []].flat(),
    pictures: [],
    videos: [],
    timing: null,
    endsTurn: true,
  };
}

// What the listener reads while the recording plays. Pieces of one turn are one caption that
// grows, so that a sentence is not torn at the seconds.
export function captionsOf(pieces) {
  const captions = [];
  let said = "";
  for (const { at, length, who, text, heard, endsTurn } of pieces) {
    if (heard) captions.push({ from: at, until: at + length, who: "you", text: heard });
    if (who === "listen") said = "";
    said = who === "speak" ? said + text : text;
    // A second of sound without a new word still belongs to the words before it.
    if (said) captions.push({ from: at, until: at + length, who: who === "you" ? "you" : "assistant", text: said });
    if (endsTurn) said = "";
  }
  return captions;
}

// The piece that is heard at a time; the last one behind the end.
export function pieceAt(pieces, time) {
  let [low, high] = [0, pieces.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (pieces[middle].at <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Seconds as 1:05 or 1:02:05.
export function clock(seconds) {
  const s = Math.floor(seconds);
  const [hours, minutes] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60)];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(s % 60)}` : `${minutes}:${two(s % 60)}`;
}

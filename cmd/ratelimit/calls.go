package main

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/trial"
)

// A callReader reads calls from logs and CSV.
type callReader struct {
	keys   []string // the fields of a line that are the key
	count  string   // CSV: the column of counts
	time   string   // CSV: the column of instants
	format string   // CSV: of instants; "" for those that are known

	file  int32             // how many files were begun
	texts map[string]string // keys that were seen, so that each is in memory once
	said  func(bytes int64) // hears of progress
}

// read reads the calls of a file: an access log, or CSV if its first line has no time in brackets.
// Errors name the file and the line.
func (r *callReader) read(name string, in io.Reader) ([]trial.Call, error) {
	r.file++
	lines := bufio.NewReaderSize(&counted{Reader: in, said: r.said}, 1<<20)
	first, err := lines.Peek(1 << 16)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, bufio.ErrBufferFull) {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	line, _, _ := strings.Cut(string(first), "\n")
	if line == "" {
		return nil, bad("%s:1: there is nothing in it, or its first line is empty", name)
	}
	if _, _, ok := bracketed(line); ok {
		return r.readLog(name, lines)
	}
	return r.readCSV(name, lines)
}

// counted tells how much was read.
type counted struct {
	io.Reader
	read int64
	said func(int64)
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.read += int64(n)
	if c.said != nil {
		c.said(c.read)
	}
	return n, err
}

// bracketed returns the text before and in the first brackets of a line.
func bracketed(line string) (before, in string, ok bool) {
	before, rest, ok := strings.Cut(line, " [")
	in, _, closed := strings.Cut(rest, "] ")
	return before, in, ok && closed
}

// logFields are the fields of an access log's line that can be a key.
var logFields = []string{"remote", "user", "method", "path", "agent"}

// readLog reads an access log in the common or the combined format of Apache and nginx.
func (r *callReader) readLog(name string, in *bufio.Reader) ([]trial.Call, error) {
	if r.count != "" || r.time != "" || r.format != "" {
		return nil, bad("%s: is an access log: --count, --time and --time-format are for CSV", name)
	}
	for _, key := range r.keys {
		if !slices.Contains(logFields, key) {
			return nil, bad("%s: is an access log: --key %q: want one of %s", name, key, strings.Join(logFields, ", "))
		}
	}
	if len(r.keys) == 0 {
		r.keys = []string{"remote"}
	}
	var calls []trial.Call
	var clock logClock
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	n := 1
	for ; lines.Scan(); n++ {
		if line := lines.Text(); line != "" {
			call, err := r.logLine(line, &clock)
			if err != nil {
				return nil, bad("%s:%d: %w", name, n, err)
			}
			call.File, call.Line = r.file-1, int32(n)
			calls = append(calls, call)
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return nil, bad("%s:%d: a line of more than a megabyte", name, n)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return calls, nil
}

func (r *callReader) logLine(line string, clock *logClock) (trial.Call, error) {
	before, at, ok := bracketed(line)
	if !ok {
		return trial.Call{}, errors.New(`want a line of an access log, such as: 10.0.0.1 - alice [02/Jan/2026:15:04:05 +0000] "GET /path HTTP/1.1" 200 17`)
	}
	instant, err := clock.parse(at)
	if err != nil {
		return trial.Call{}, fmt.Errorf("time %q: want one such as 02/Jan/2026:15:04:05 +0000", at)
	}
	parts, quoted := make([]string, len(r.keys)), strings.Split(line, `"`)
	for i, field := range r.keys {
		if parts[i], ok = logField(field, before, quoted); !ok {
			return trial.Call{}, fmt.Errorf("there is no %s in it", field)
		}
	}
	key, err := r.key(parts)
	return trial.Call{At: instant, Key: key, Count: 1}, err
}

// logField returns a field of a line of an access log, from the text before the time and what stands
// between quotes.
func logField(field, before string, quoted []string) (string, bool) {
	caller := strings.Fields(before)
	var request []string
	if len(quoted) > 1 {
		request = strings.Fields(quoted[1])
	}
	switch {
	case field == "remote" && len(caller) > 2:
		return caller[0], true
	case field == "user" && len(caller) > 2:
		return caller[len(caller)-1], true
	case field == "method" && len(request) > 1:
		return request[0], true
	case field == "path" && len(request) > 1:
		path, _, _ := strings.Cut(request[1], "?")
		return path, true
	case field == "agent" && len(quoted) > 6:
		return quoted[5], true
	}
	return "", false
}

// logClock reads instants of access logs, of which many follow each other that are the same.
type logClock struct {
	text string
	at   time.Time
}

func (c *logClock) parse(text string) (time.Time, error) {
	if text == c.text {
		return c.at, nil
	}
	at, err := time.Parse("02/Jan/2006:15:04:05 -0700", text)
	if err == nil {
		c.text, c.at = text, at.UTC()
	}
	return c.at, err
}

// Names of columns that are taken for the time and the key if none is named.
var (
	timeColumns = []string{"time", "timestamp", "ts", "at", "instant", "date"}
	keyColumns  = []string{"key", "user", "user_id", "customer", "account", "tenant", "ip", "remote"}
)

// readCSV reads CSV with a first line that names the columns.
func (r *callReader) readCSV(name string, in io.Reader) ([]trial.Call, error) {
	rows := csv.NewReader(in)
	rows.ReuseRecord = true
	fault := func(err error) error {
		if e, ok := errors.AsType[*csv.ParseError](err); ok {
			return bad("%s:%d: %w", name, e.Line, e.Err)
		}
		return fmt.Errorf("%s: %w", name, err)
	}
	heading, err := rows.Read()
	if err != nil {
		return nil, fault(err)
	}
	columns, err := r.columns(slices.Clone(heading))
	if err != nil {
		return nil, bad("%s:1: %w", name, err)
	}
	var calls []trial.Call
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			return calls, nil
		}
		if err != nil {
			return nil, fault(err)
		}
		line, _ := rows.FieldPos(0)
		call, err := r.csvRow(row, columns)
		if err != nil {
			return nil, bad("%s:%d: %w", name, line, err)
		}
		call.File, call.Line = r.file-1, int32(line)
		calls = append(calls, call)
	}
}

// csvColumns are the places of columns.
type csvColumns struct {
	time, count int // count is −1 if there is none
	keys        []int
}

func (r *callReader) columns(heading []string) (c csvColumns, err error) {
	for i := range heading {
		heading[i] = strings.ToLower(strings.TrimSpace(strings.TrimPrefix(heading[i], "\ufeff")))
	}
	find := func(flag, named string, usual []string) int {
		if named != "" {
			usual = []string{strings.ToLower(named)}
		}
		for _, u := range usual {
			if i := slices.Index(heading, u); i >= 0 {
				return i
			}
		}
		err = errors.Join(err, fmt.Errorf("no column %s among %s: name one by %s", strings.Join(usual, ", "), strings.Join(heading, ", "), flag))
		return -1
	}
	c.time, c.count = find("--time", r.time, timeColumns), -1
	for _, key := range r.keys {
		c.keys = append(c.keys, find("--key", key, nil))
	}
	if len(r.keys) == 0 {
		c.keys = []int{find("--key", "", keyColumns)}
	}
	if r.count != "" {
		c.count = find("--count", r.count, nil)
	}
	return c, err
}

func (r *callReader) csvRow(row []string, c csvColumns) (trial.Call, error) {
	at, err := r.instant(row[c.time])
	if err != nil {
		return trial.Call{}, err
	}
	count := 1.0
	if c.count >= 0 {
		if count, err = strconv.ParseFloat(strings.TrimSpace(row[c.count]), 64); err != nil || math.IsNaN(count) || math.IsInf(count, 0) || count < 0 {
			return trial.Call{}, fmt.Errorf("count %q: must be a number that is not negative", row[c.count])
		}
	}
	parts := make([]string, len(c.keys))
	for i, column := range c.keys {
		parts[i] = row[column]
	}
	key, err := r.key(parts)
	return trial.Call{At: at, Key: key, Count: count}, err
}

// instant reads an instant: by --time-format, or RFC 3339, as a database prints it, or as seconds,
// milliseconds, microseconds or nanoseconds since 1970.
func (r *callReader) instant(text string) (time.Time, error) {
	text = strings.TrimSpace(text)
	layouts := []string{time.RFC3339Nano, "2006-01-02 15:04:05.999999999Z07", "2006-01-02 15:04:05.999999999-07:00", "2006-01-02 15:04:05.999999999"}
	if r.format != "" {
		layouts = []string{r.format}
	}
	for _, layout := range layouts {
		if at, err := time.Parse(layout, text); err == nil {
			return inRange(at.UTC(), text)
		}
	}
	if v, err := strconv.ParseFloat(text, 64); err == nil && r.format == "" && v >= 0 {
		for v >= 1e11 { // no seconds before the year 5138
			v /= 1000
		}
		return inRange(time.UnixMicro(int64(math.Round(v*1e6))).UTC(), text)
	}
	return time.Time{}, fmt.Errorf("time %q: want one such as 2026-01-02T15:04:05Z, or seconds since 1970; or give --time-format", text)
}

// inRange reports an instant that limits do not know.
func inRange(at time.Time, text string) (time.Time, error) {
	if at.Year() < 1970 || at.Year() > 2284 {
		return at, fmt.Errorf("time %q: must be in the years 1970 to 2284", text)
	}
	return at.Truncate(time.Microsecond), nil
}

// key makes a key of its parts.
func (r *callReader) key(parts []string) (string, error) {
	key := parts[0]
	if len(parts) > 1 {
		key = ratelimit.Key(parts[0], parts[1:]...)
	}
	if known, ok := r.texts[key]; ok {
		return known, nil
	}
	if len(key) > ratelimit.MaxKeyLength || !utf8.ValidString(key) || strings.ContainsRune(key, 0) {
		return "", fmt.Errorf("key of %d bytes: must be valid UTF-8 without zero bytes, of at most %d", len(key), ratelimit.MaxKeyLength)
	}
	key = strings.Clone(key)
	r.texts[key] = key
	return key, nil
}

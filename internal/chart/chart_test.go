package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

func example(title string) *Chart {
	return &Chart{
		Title: title, X: Time(time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC), time.Hour, true),
		Panels: []Panel{{
			Label: "tokens", Height: 100,
			Lines:  []Line{{Name: title, Points: []Point{{X: 0, Y: 10}, {X: 3600, Y: -5}}}},
			Levels: []Level{{Name: "capacity 10", Y: 10}},
			Bands:  []Band{{Name: "paused", From: -10, To: 60}},
			Bars:   []Bars{{Name: "granted", Values: []float64{1, 0, 2}}},
			Shade:  &Shading{Name: "debt"},
		}},
	}
}

// A picture is sound XML whatever its texts are.
func TestTexts(t *testing.T) {
	t.Parallel()
	for _, title := range []string{"plain", `<script>alert("1")</script>&amp;`, "\x1b[31m\u202e\x00\xff", strings.Repeat("長", 200), strings.Repeat("word ", 60), ""} {
		text := example(title).SVG()
		if strings.ContainsAny(text, "\x1b\u202e\x00") {
			t.Errorf("%q is in the picture as it is", title)
		}
		if err := check([]byte(text)); err != nil && title == "plain" {
			t.Error(err)
		}
		d := xml.NewDecoder(strings.NewReader(text))
		for {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%q: %v", title, err)
			}
			if start, ok := token.(xml.StartElement); ok && start.Name.Local == "script" {
				t.Errorf("%q became an element", title)
			}
		}
	}
}

// The pictures of the documentation have a title, colours for dark pages, and texts that end within
// the picture, which no font is stretched to.
func TestPicturesOfDocs(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../docs/*.svg")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		picture, err := os.ReadFile(file)
		if err == nil {
			err = check(picture)
		}
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// Equal ratios are equal steps on an axis of ratios.
func TestRatios(t *testing.T) {
	t.Parallel()
	c := Chart{
		X:      Axis{Log: true, From: 1, To: 100, Text: Number},
		Panels: []Panel{{Height: 200, Log: true, Lines: []Line{{Points: []Point{{X: 1, Y: 10}, {X: 10, Y: 100}, {X: 100, Y: 1000}}}}}},
	}
	got := regexp.MustCompile(`points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"`).FindStringSubmatch(c.SVG())
	if got == nil {
		t.Fatal(c.SVG())
	}
	at := make([]float64, 6)
	for i := range at {
		at[i], _ = strconv.ParseFloat(got[i+1], 64)
	}
	if math.Abs(at[2]-at[0]-(at[4]-at[2])) > 0.2 || math.Abs(at[3]-at[1]-(at[5]-at[3])) > 0.2 {
		t.Errorf("the points are %v", at)
	}
}

func TestThemes(t *testing.T) {
	t.Parallel()
	c := example("a")
	for theme, want := range map[Theme][2]bool{Auto: {true, true}, Light: {true, false}, Dark: {false, true}} {
		c.Theme = theme
		text := c.SVG()
		if got := [2]bool{strings.Contains(text, "#ffffff"), strings.Contains(text, "#0d1117")}; got != want {
			t.Errorf("theme %q: light and dark are %v, want %v", theme, got, want)
		}
		if both := strings.Contains(text, "prefers-color-scheme"); both != (theme == Auto) {
			t.Errorf("theme %q: by the reader's choice: %t", theme, both)
		}
	}
}

func TestTicks(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		from, to float64
		n        int
		want     string
	}{
		{0, 100, 4, "0 50 100"},
		{-5, 20, 5, "−5 0 5 10 15 20"},
		{0, 1, 5, "0 0.2 0.4 0.6 0.8 1"},
		{0, 2_500_000, 3, "0 1,000,000 2,000,000"},
		{0, 0, 5, ""},
	} {
		var got []string
		for _, tick := range Ticks(test.from, test.to, test.n) {
			got = append(got, Number(tick))
		}
		if text := strings.Join(got, " "); text != test.want {
			t.Errorf("from %g to %g: got %q, want %q", test.from, test.to, text, test.want)
		}
	}
}

func TestTimes(t *testing.T) {
	t.Parallel()
	from := time.Date(2026, 3, 2, 8, 50, 0, 0, time.UTC)
	for _, test := range []struct {
		lasts time.Duration
		clock bool
		want  string
	}{
		{time.Minute, false, "0s 10s 20s 30s 40s 50s 1m"},
		{4 * time.Hour, false, "0s 1h 2h 3h 4h"},
		{4 * time.Hour, true, "09:00 10:00 11:00 12:00"},
		{72 * time.Hour, true, "2026-03-03 2026-03-04 2026-03-05"},
		{2 * time.Second, false, "0s 500ms 1s 1.5s 2s"},
	} {
		a := Time(from, test.lasts, test.clock)
		var got []string
		for _, tick := range a.Ticks {
			got = append(got, a.Text(tick))
		}
		if text := strings.Join(got, " "); text != test.want {
			t.Errorf("%v: got %q, want %q", test.lasts, text, test.want)
		}
	}
}

// check returns an error if a picture has no title or no colours for dark pages, or a text that is
// stretched or may end beyond the picture: another font than the layout's may be an eighth wider.
func check(picture []byte) error {
	if !bytes.Contains(picture, []byte("prefers-color-scheme: dark")) || !bytes.Contains(picture, []byte("<title>")) {
		return errors.New("no title, or no colours for dark pages")
	}
	attribute := func(e xml.StartElement, name, otherwise string) string {
		for _, a := range e.Attr {
			if a.Name.Local == name {
				return a.Value
			}
		}
		return otherwise
	}
	number := func(e xml.StartElement, name, otherwise string) float64 {
		v, _ := strconv.ParseFloat(attribute(e, name, otherwise), 64)
		return v
	}
	var text xml.StartElement
	wide, size := 0.0, "0"
	for d := xml.NewDecoder(bytes.NewReader(picture)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		switch token := token.(type) {
		case xml.StartElement:
			text = token.Copy()
			if text.Name.Local == "svg" {
				wide, size = number(text, "width", "0"), attribute(text, "font-size", "0")
			}
		case xml.CharData:
			if text.Name.Local != "text" {
				continue
			}
			length := textWidth(string(token)) * number(text, "font-size", size) * 1.125
			from := number(text, "x", "0")
			switch attribute(text, "text-anchor", "start") {
			case "end":
				from -= length
			case "middle":
				from -= length / 2
			}
			if from < 0 || from+length > wide || attribute(text, "textLength", "") != "" {
				return fmt.Errorf("%q is from %.0f to %.0f of %.0f, or stretched", token, from, from+length, wide)
			}
			text.Name.Local = ""
		case xml.EndElement:
			text.Name.Local = ""
		}
	}
}

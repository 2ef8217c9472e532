package integration

import (
	"archive/zip"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// zoneNames returns the names of all time zones that Go's own copy of the database has.
func zoneNames() ([]string, error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, err
	}
	archive, err := zip.OpenReader(filepath.Join(strings.TrimSpace(string(root)), "lib", "time", "zoneinfo.zip"))
	if err != nil {
		return nil, err
	}
	defer archive.Close()
	var names []string
	for _, f := range archive.File {
		if !strings.HasSuffix(f.Name, "/") && f.Name != "Factory" {
			names = append(names, f.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

const daySeconds = 24 * 60 * 60

// stretch is a time in which the clocks of a zone keep their distance from Greenwich, all in
// seconds: from an instant to one before another.
type stretch struct{ from, to, offset int64 }

// stretchesOf returns those of a location from one year to another. It looks at the clock once
// a day, and where its distance from Greenwich has changed, it halves the time until it knows
// when.
func stretchesOf(location *time.Location, from, to int) (all []stretch, err error) {
	offset := func(second int64) int64 {
		_, o := time.Unix(second, 0).In(location).Zone()
		return int64(o)
	}
	begin := time.Date(from, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	end := time.Date(to, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	last := stretch{begin, end, offset(begin)}
	for at := begin; at < end; at += daySeconds {
		after := offset(at + daySeconds)
		if after == last.offset {
			continue
		}
		low, high := at, at+daySeconds
		for high-low > 1 {
			if middle := low + (high-low)/2; offset(middle) == last.offset {
				low = middle
			} else {
				high = middle
			}
		}
		if offset(high) != after {
			return nil, fmt.Errorf("%v changes twice in the day after %v, which this does not understand", location, time.Unix(at, 0).UTC())
		}
		last.to = high
		all = append(all, last)
		last = stretch{high, end, after}
	}
	return append(all, last), nil
}

// daysIn returns the days that clocks show in stretches, as days since 1970, and the first
// second of each; of days that begin at a time of day.
func daysIn(stretches []stretch, at time.Duration) (days []int64, first map[int64]int64) {
	first = map[int64]int64{}
	for _, s := range stretches {
		s.offset -= int64(at / time.Second)
		for d := dayOf(s.from + s.offset); d <= dayOf(s.to-1+s.offset); d++ {
			if _, known := first[d]; !known {
				first[d] = max(s.from, d*daySeconds-s.offset)
				days = append(days, d)
			}
		}
	}
	slices.Sort(days)
	return days[1:], first // the first one had begun
}

func dayOf(second int64) int64 {
	d := second / daySeconds
	if second%daySeconds < 0 {
		d--
	}
	return d
}
